"""Ten minutes on one GPU, in three calls of at most 170 s: what is most likely to fail comes first.

    python benchmarks/gpu/ten_minutes.py --part torch|vllm|steps [--out FOLDER] [--tiny --device cpu]

In: a CUDA device (or a CPU: a dry run). Out: the files of run.py, each line on disk before the next case starts, and
ten_minutes.json: every case so far with status, reason, prediction and measurement. The same command with the same
folder goes on where it was cut off. Nothing is downloaded; carry.py packs what a machine without a network lacks.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.cases import TEN_MINUTES
from benchmarks.gpu.records import Records
from benchmarks.gpu.run import measure

CALL_LIMIT_S = 160.0
"""Seconds of one part. Starting Python, detecting the GPU and writing the table take the other ten of a call."""

CASE_LIMIT_S = 80.0
"""Seconds of one case, so that one that hangs leaves half of the call to the others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in order. Gives the exit code of run.py."""
    description = (__doc__ or "").splitlines()[0]
    limits = {"case_limit_s": CASE_LIMIT_S}
    return measure(TEN_MINUTES, "gpu-ten-minutes", CALL_LIMIT_S, description, _write, arguments, **limits)


def _write(records: Records) -> None:
    text = json.dumps({"schema_version": 1, "cases": list(records.results().values())}, indent=1) + "\n"
    partial = records.folder / "ten_minutes.json.part"
    partial.write_text(text, encoding="utf-8")
    partial.replace(records.folder / "ten_minutes.json")


if __name__ == "__main__":
    sys.exit(main())
