"""What a wheel holds beside files of the repository: each profile of hardware and of a framework once more as JSON.

In: hardware_profiles/*/*.yaml and rlplan/frameworks/*.yaml. Out: the same data beside them, as ruamel.yaml reads it. An
estimate reads two profiles of hardware and one of a framework: 20 ms as YAML, with the parser's import, half a
millisecond as JSON. An editable install has none and reads the YAML.

The description of a package index is the README without its images and without links into the repository, for an index
has no such files. They will become absolute once the project has a public address.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PLACES = {"hardware_profiles/*/*.yaml": "rlplan/_", "rlplan/frameworks/*.yaml": ""}
"""Files that are written as JSON too, and what stands before their path in a wheel."""


IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]+\)\n*")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]+\)")


class ReadmeWithoutFiles(MetadataHookInterface):
    """Called by hatchling when it reads the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        plain = LINK.sub(r"\1", IMAGE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": plain}


class ProfilesAsJson(BuildHookInterface):
    """Called by hatchling when it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        from ruamel.yaml import YAML

        self.made = tempfile.TemporaryDirectory()
        files = [(path, place) for pattern, place in PLACES.items() for path in Path(self.root).glob(pattern)]
        for number, (path, place) in enumerate(sorted(files)):
            made = Path(self.made.name, f"{number}.json")
            data = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
            made.write_text(json.dumps(data, ensure_ascii=False), "utf-8")
            name = path.relative_to(self.root).with_suffix(".json")
            build_data["force_include"][str(made)] = f"{place}{name.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.made.cleanup()
