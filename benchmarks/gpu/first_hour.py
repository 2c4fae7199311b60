"""The first hour on one GPU: what is most likely to fail comes first, in parts of under two minutes.

    python benchmarks/gpu/first_hour.py [--part NAME ...] [--out FOLDER] [--tiny --device cpu]

In: a CUDA device (or a CPU: a dry run). Out: the files of run.py, and first_hour.json, written anew after each part:
every case so far with status, reason, prediction and measurement. The same command with the same folder goes on where
it was cut off. What needs a package that is not here says so and is tried when it is: torch alone is enough for the
hand-over, the sync, the offload and the rates. Nothing is downloaded. See README.md beside this file.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.cases import FIRST_HOUR
from benchmarks.gpu.records import Records
from benchmarks.gpu.run import measure

PART_LIMIT_S = 110.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in order. Gives the exit code of run.py."""
    return measure(FIRST_HOUR, "gpu-first-hour", PART_LIMIT_S, (__doc__ or "").splitlines()[0], _write, arguments)


def _write(records: Records) -> None:
    text = json.dumps({"schema_version": 1, "cases": list(records.results().values())}, indent=1) + "\n"
    partial = records.folder / "first_hour.json.part"
    partial.write_text(text, encoding="utf-8")
    partial.replace(records.folder / "first_hour.json")


if __name__ == "__main__":
    sys.exit(main())
