"""What a wheel holds beside files of the repository: each hardware profile once more as JSON.

In: hardware_profiles/*/*.yaml. Out: the same data beside them, as ruamel.yaml reads it. An estimate reads two profiles:
20 ms as YAML, with the parser's import, half a millisecond as JSON. An editable install has none and reads the YAML.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "hardware_profiles"


class ProfilesAsJson(BuildHookInterface):
    """Called by hatchling when it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        from ruamel.yaml import YAML

        self.made = tempfile.TemporaryDirectory()
        for number, path in enumerate(sorted(Path(self.root, FOLDER).glob("*/*.yaml"))):
            made = Path(self.made.name, f"{number}.json")
            data = YAML(typ="safe", pure=True).load(path.read_text("utf-8"))
            made.write_text(json.dumps(data, ensure_ascii=False), "utf-8")
            name = path.relative_to(self.root).with_suffix(".json")
            build_data["force_include"][str(made)] = f"rlplan/_{name.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.made.cleanup()
