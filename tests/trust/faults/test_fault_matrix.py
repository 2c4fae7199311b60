"""The fault matrix: six victims, eight points of a step, four kinds of end, three kinds of run; none hangs.

A night tries one of twelve slices of the 576 cells (the environment variable RLPLAN_FAULT_SLICE, by default the day of
the year), one run a mode. What was measured goes into the file of JSON lines that RLPLAN_FAULT_TABLE names.
"""

import json
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.run_folder.rollout_files import list_step_files
from tests.runtime.conftest import FinishedRun, finish, start
from tests.trust.faults.fault_matrix import STALL_S, Fault, FaultyRun, Outcome, assign_steps, list_cells, num_steps
from tests.trust.faults.points import KINDS, MODES, NUM_SLICES, POINTS, VICTIMS

NOTICED_S, RECOVERED_S = 15.0, 60.0
"""Limits from a death (or the end of the stall time) to its notice, then to the end of the next step. Scaled."""
SIZES = (
    "workload.num_prompts_per_step=8",
    "workload.mini_batch_size=64",
    "workload.evaluate_every=1000",
    "algorithm.learning_rate=1e-3",
    "preflight.rehearses=false",
    "checkpoints.every=1",
    "limits.max_restarts=1000",
)


def job(mode: str, faults: list[Fault], stall_s: float | None = None) -> tuple[str, ...]:
    """Arguments of `rlplan`. stall_s: STALL_S, scaled, if None."""
    devices, stall_s = 2 if mode == "asynchronous" else 1, stall_s or round(scale_seconds(STALL_S))
    limits = (f"limits.stall_timeout_s={stall_s}", f"hardware.num_devices={devices}")
    return ("run", "examples/quickstart.yaml", *SIZES, *limits, *MODES[mode], f"workload.num_steps={num_steps(faults)}")


def slice_of_tonight() -> int:
    return int(os.environ.get("RLPLAN_FAULT_SLICE", time.localtime().tm_yday)) % NUM_SLICES


def test_every_cell_is_in_one_slice_and_each_slice_has_all_pairs() -> None:
    slices = [list_cells(number) for number in range(NUM_SLICES)]
    assert len({cell for cells in slices for cell in cells}) == len(VICTIMS) * len(POINTS) * len(KINDS) * len(MODES)
    sizes = {"victim": VICTIMS, "point": POINTS, "kind": KINDS, "mode": MODES}
    for cells in slices:
        for first_axis, others in sizes.items():
            for second_axis, more in sizes.items():
                pairs = {(getattr(cell, first_axis), getattr(cell, second_axis)) for cell in cells}
                assert len(pairs) == (len(others) * len(more) if first_axis != second_axis else len(others)), (
                    first_axis,
                    second_axis,
                )


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_ends_as_one_without_faults_whatever_process_fails(mode: str, tmp_path: Path) -> None:
    faults = assign_steps([cell for cell in list_cells(slice_of_tonight()) if cell.mode == mode])
    outcomes: list[Outcome] = []
    late: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        late.extend([outcome] if _is_late(outcome, stall_s) else [])  # now: later the load may be another
        print(outcome)
        if path := os.environ.get("RLPLAN_FAULT_TABLE"):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    stall_s = round(scale_seconds(STALL_S))
    arguments = job(mode, faults, stall_s)
    run = FaultyRun(arguments, faults, tmp_path / "run").play(note)
    assert run.exit_code == 0, run.stderr[-4000:]
    assert [outcome for outcome in outcomes if outcome.ending == "HANGS"] == []
    assert late == []
    whole = finish(start(*arguments, "--out", str(tmp_path / "whole")), tmp_path / "whole")
    assert whole.exit_code == 0, whole.stderr
    assert_same(mode, run, whole)


def _is_late(outcome: Outcome, stall_s: float) -> bool:
    """Whether a fault that has just passed took longer than it may on this machine."""
    noticed_s = scale_seconds(NOTICED_S) + (stall_s if outcome.fault.kind == "SIGSTOP" else 0)
    return (outcome.noticed_s or 0) > noticed_s or (outcome.recovered_s or 0) > scale_seconds(RECOVERED_S)


def assert_same(mode: str, run: FinishedRun, whole: FinishedRun) -> None:
    """Assert files equal to the byte. If generation runs ahead, a step's prompts depend on time; each trains once."""
    if mode != "asynchronous":
        for name in ("metrics.jsonl", "prompts.jsonl", "policy/model.safetensors"):
            assert (run.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name
        kept, others = (list_step_files(folder) for folder in (run.folder, whole.folder))
        assert [path.read_bytes() for path in kept.values()] == [path.read_bytes() for path in others.values()]
        return
    assert [row["step"] for row in run.metrics] == [row["step"] for row in whole.metrics]
    assert max(row["staleness/max"] for row in run.metrics if row["step"] > 0) <= 1
    assert _prompts(run) == _prompts(whole)


def _prompts(run: FinishedRun) -> Counter[str]:
    rows = [json.loads(line) for line in (run.folder / "prompts.jsonl").read_text().splitlines()]
    return Counter(prompt for row in rows for prompt in row["prompts"])
