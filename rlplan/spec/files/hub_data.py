"""Data sets that a job names by hub id: how they are written, and how they stand in a plan.

In: a place as a job has it. Out: `hf://datasets/ORG/NAME/PART`, which no folder can be. Left out: the hub's cache and
the network (runtime/models/snapshots.py).
"""

import re
from pathlib import Path

HUB_DATA = "hf://datasets/"
"""As the hub's own library writes addresses of data sets."""
_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})(?::([\w./-]{1,200}))?")
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data; a name with one of them is a file's."""


def hub_data(place: str, folder: Path) -> str | None:
    """The address of `ORG/NAME` or `ORG/NAME:PART`, a file or a folder in it; None where a path is meant.

    folder: that paths are relative to. A path is meant where its first folder is there, or its name is a file's.

    >>> hub_data("openai/gsm8k:main", Path("/")), hub_data("data/train.jsonl", Path("/")), hub_data("../a/b", Path("/"))
    ('hf://datasets/openai/gsm8k/main', None, None)
    """
    match = _ID.fullmatch(place)
    if match is None or match[2].endswith(FILES) or (folder / match[1]).exists() or ".." in place:
        return None
    return f"{HUB_DATA}{match[1]}/{match[2]}" + (f"/{match[3].strip('/')}" if match[3] else "")


def id_and_part(address: str) -> tuple[str, str]:
    """(`ORG/NAME`, the part, empty for all of it) of an address.

    >>> id_and_part("hf://datasets/openai/gsm8k/main/train.parquet")
    ('openai/gsm8k', 'main/train.parquet')
    """
    owner, name, *part = address.removeprefix(HUB_DATA).split("/")
    return f"{owner}/{name}", "/".join(part)
