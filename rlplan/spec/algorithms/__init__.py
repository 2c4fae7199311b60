"""The algorithms: torch-free declarations, as data.

In: `algorithms.json` in this folder: the fields of each declaration by name, with a description under `about`. Out:
`ALGORITHMS`, by name. A new entry is a new algorithm; there is no other list.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from rlplan.spec.declaration import Algorithm


def _read_algorithms() -> dict[str, Algorithm]:
    entries = json.loads(Path(__file__).with_name("algorithms.json").read_text("utf-8"))
    return {
        name: Algorithm(name=name, **{key: value for key, value in entry.items() if key != "about"})
        for name, entry in entries.items()
    }


ALGORITHMS: Mapping[str, Algorithm] = _read_algorithms()
"""Every declared algorithm by name."""

DEFAULT = "grpo"
"""The algorithm of a job that names none."""
