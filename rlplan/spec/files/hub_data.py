"""Data sets named by hub id: how jobs write them, and how plans store them.

In: a place in a job. Out: `hf://datasets/ORG/NAME/PART`, which cannot be a folder. Left out: the hub's cache and the
network (runtime/models/snapshots.py).
"""

import re
from pathlib import Path

HUB_DATA = "hf://datasets/"
"""Prefix of data set addresses, as in `huggingface_hub`."""
_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})(?::([\w./-]{1,200}))?")
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""Endings of data files; a name with one of them is a local file."""


def find_hub_address(place: str, folder: Path) -> str | None:
    """The address of `ORG/NAME` or `ORG/NAME:PART`, where PART is a file or folder in it; None for a local path.

    folder: the folder that paths are relative to. A place is local if its first folder exists or it ends like a file.

    >>> find_hub_address("openai/gsm8k:main", Path("/"))
    'hf://datasets/openai/gsm8k/main'
    >>> find_hub_address("data/train.jsonl", Path("/")) is find_hub_address("../a/b", Path("/")) is None
    True
    """
    match = _ID.fullmatch(place)
    if match is None or match[2].endswith(FILES) or (folder / match[1]).exists() or ".." in place:
        return None
    return f"{HUB_DATA}{match[1]}/{match[2]}" + (f"/{match[3].strip('/')}" if match[3] else "")


def split_address(address: str) -> tuple[str, str]:
    """(`ORG/NAME`, PART) of an address; PART is empty for the whole data set.

    >>> split_address("hf://datasets/openai/gsm8k/main/train.parquet")
    ('openai/gsm8k', 'main/train.parquet')
    """
    owner, name, *part = address.removeprefix(HUB_DATA).split("/")
    return f"{owner}/{name}", "/".join(part)
