"""A lost engine is restarted and its work done again; what cannot be restarted ends the run by name."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rlplan.dataflow.schedule import Action
from rlplan.errors import RunError
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.runtime.fault_tolerance.supervision import (
    LostProcessError,
    Supervisor,
    check_freed,
    predict_release,
)
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.units import MIB
from rlplan.vocabulary import ActionKind, MemoryKind, Phase, Provenance, Role, Stream
from tests.factories import EXAMPLES
from tests.runtime.conftest import FEW_PROCESSES, alive, finish, list_descendants, start
from tests.runtime.fault_tolerance.test_failures import (
    engine_pid,
    lose_engine,
    run_and_interrupt,
    until_ended,
    wait_for_steps,
)
from tests.runtime.live.four_bits import quantize
from tests.waiting import wait_until


def action(kind: ActionKind, *processes: str) -> Action:
    return Action(kind.value, kind, Role.POLICY, Phase.ROLLOUT, "shared", Stream.GENERATION, processes)


def lost(process: str) -> LostProcessError:
    return LostProcessError(f"{process} is gone", process=process, where="log", rule="lives", way_out="read")


def failing(times: int, process: str) -> tuple[Callable[[Action, int], list[Measurement]], list[int]]:
    calls: list[int] = []

    def handler(action: Action, step: int) -> list[Measurement]:
        calls.append(step)
        if len(calls) <= times:
            raise lost(process)
        return []

    return handler, calls


def supervisor(max_restarts: int) -> tuple[Supervisor, list[str], list[str]]:
    recovered: list[str] = []
    announced: list[str] = []
    revive, announce = (lambda process, *_: recovered.append(process)), (lambda *words: announced.append(words[2]))
    return Supervisor(max_restarts, revive, announce), recovered, announced


def test_the_work_of_a_lost_engine_is_done_again_after_it_was_started_anew() -> None:
    guard, recovered, announced = supervisor(2)
    handler, calls = failing(1, "rollout_engine/0")
    assert guard.run_with_restarts(handler, action(ActionKind.GENERATE, "rollout_engine/0"), 3) == ([], 2)
    assert calls == [3, 3]
    assert recovered == ["rollout_engine/0"]
    assert "rollout_engine/0 is gone; it is restarted (attempt 2)" in announced[0]


def test_an_engine_that_keeps_dying_ends_the_run() -> None:
    guard, recovered, _ = supervisor(2)
    handler, calls = failing(9, "rollout_engine/0")
    with pytest.raises(RunError, match="at most 2 times"):
        guard.run_with_restarts(handler, action(ActionKind.GENERATE, "rollout_engine/0"), 1)
    assert len(calls) == 3
    assert len(recovered) == 2


@pytest.mark.parametrize(
    ("process", "kind", "step", "rule"),
    [
        ("policy_trainer/1", ActionKind.TRAIN_FORWARD_BACKWARD, 1, "cannot rejoin its process group"),
        ("policy_trainer/0", ActionKind.SYNC_WEIGHTS, 1, "cannot rejoin its process group"),
        ("rollout_engine/0", ActionKind.START_ENGINE, 0, "this was start_engine"),
        ("rollout_engine/0", ActionKind.CHECKPOINT, 1, "this was checkpoint"),
    ],
)
def test_what_cannot_be_started_anew_ends_the_run(process: str, kind: ActionKind, step: int, rule: str) -> None:
    guard, recovered, _ = supervisor(2)
    with pytest.raises(RunError, match=rule):
        guard.run_with_restarts(failing(1, process)[0], action(kind, process), step)
    assert recovered == []


@pytest.mark.parametrize("kind", [ActionKind.START_ENGINE, ActionKind.STOP_ENGINE])
def test_an_engine_that_is_lost_while_it_changes_places_is_started_anew(kind: ActionKind) -> None:
    guard, recovered, _ = supervisor(1)
    assert guard.run_with_restarts(failing(1, "rollout_engine/0")[0], action(kind, "rollout_engine/0"), 2) == ([], 2)
    assert recovered == ["rollout_engine/0"]


def test_what_two_threads_find_lost_is_started_anew_once() -> None:
    guard, recovered, _ = supervisor(1)
    guard.is_replaced = lambda error: len(recovered) > error.restart_count
    generate = action(ActionKind.GENERATE, "rollout_engine/0")
    guard.run_with_restarts(failing(1, "rollout_engine/0")[0], generate, 1)
    calls: list[int] = []

    def collect() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise lost("rollout_engine/0")
        return "collected"

    assert guard.call_with_restarts(collect, generate, 1) == "collected"
    assert recovered == ["rollout_engine/0"]


def test_a_restart_says_how_many_requests_are_begun_anew() -> None:
    guard, _, announced = supervisor(1)
    guard.num_open = lambda process: 7
    guard.run_with_restarts(failing(1, "rollout_engine/0")[0], action(ActionKind.GENERATE, "rollout_engine/0"), 1)
    assert announced[0].endswith("(attempt 2) and 7 requests start over")


def test_no_restarts_are_made_where_none_are_allowed() -> None:
    guard, recovered, _ = supervisor(0)
    with pytest.raises(RunError, match="is gone"):
        guard.run_with_restarts(failing(1, "scorer/reference/0")[0], action(ActionKind.SCORE, "scorer/reference/0"), 1)
    assert recovered == []


def ledger(*sizes: tuple[RunPhase, str, int]) -> MemoryLedger:
    rows = tuple(
        LedgerRow(
            run_phase, name, Phase.SWITCH, "policy_trainer/0", "cpu:0", Role.POLICY, MemoryKind.OPTIMIZER, "device",
            size * MIB, size * MIB, Provenance.DERIVED, "test",
        )
        for run_phase, name, size in sizes
    )  # fmt: skip
    return MemoryLedger(rows, 0, 0, True, tuple((run_phase, name) for run_phase, name, _ in sizes))


SWAP = (
    ("start", "start_trainer", 400),
    ("first", "train", 900),
    ("first", "offload_role", 100),
    ("steady", "reload_role", 900),
    ("steady", "train", 900),
    ("steady", "offload_role", 100),
)


def test_what_an_action_frees_is_what_was_held_before_less_what_is_held_after() -> None:
    book = ledger(*SWAP)  # type: ignore[arg-type]
    assert predict_release(book, "offload_role", 1, "policy_trainer/0") == 800 * MIB
    assert predict_release(book, "offload_role", 5, "policy_trainer/0") == 800 * MIB
    assert predict_release(book, "reload_role", 5, "policy_trainer/0") == -800 * MIB


def test_an_offload_that_frees_less_than_nine_tenths_fails_loudly() -> None:
    book = ledger(*SWAP)  # type: ignore[arg-type]
    offload = action(ActionKind.OFFLOAD_ROLE, "policy_trainer/0")
    check_freed(book, offload, 5, {"policy_trainer/0": 1000 * MIB}, {"policy_trainer/0": 270 * MIB})
    with pytest.raises(RunError, match=r"offload_role freed 700 MiB in policy_trainer/0, the plan says 800 MiB"):
        check_freed(book, offload, 5, {"policy_trainer/0": 1000 * MIB}, {"policy_trainer/0": 300 * MIB})


@pytest.mark.engine
@pytest.mark.nightly  # in `make test` one is killed: test_failures.py
def test_an_engine_that_hangs_is_started_anew_and_a_signal_ends_it_all(tmp_path: Path) -> None:
    # The first step, in which kernels are made ready, is longer than 5 s beside other tests.
    folder, stall_s = tmp_path / "run", round(scale_seconds(12.0))
    few = ("checkpoints.every=1", "workload.num_heldout_prompts=8", "preflight.rehearses=false", *FEW_PROCESSES)
    stalls = f"limits.stall_timeout_s={stall_s}"
    with until_ended(start("run", "examples/quickstart.yaml", *few, stalls, "--out", str(folder))) as process:
        wait_for_steps(folder, 2)
        lost = lose_engine(process, folder, signal.SIGSTOP)
        run = run_and_interrupt(process, folder, signal.SIGTERM)
    assert run.exit_code == 75, run.stderr
    assert "resume with `rlplan run --resume" in run.stderr
    assert [row["step"] for row in run.metrics] == list(range(len(run.metrics)))
    assert max(row.get("sync/logprob_difference_max", 0.0) for row in run.metrics) < 1e-4
    assert 2 in {span.attempt for span in run.trace.spans}
    assert alive(lost) == []
    (alarm,) = (folder / "alarms.jsonl").read_text().splitlines()
    assert f"hangs: no progress for {stall_s} s" in alarm


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("job", ["maturity/2-swapping", "memory-bound"])
def test_time_sharing_frees_what_the_plan_says(job: str, tmp_path: Path) -> None:
    """Every stop and offload is held against the plan while it runs; less than nine tenths would end the run."""
    overrides = ("placement.placement=colocated", "placement.offload=disk", "workload.num_steps=2")
    run = finish(start("run", f"examples/{job}.yaml", *overrides, "--out", str(tmp_path / "run")), tmp_path / "run")
    assert run.exit_code == 0, run.stderr
    rehearsal = json.loads((run.folder / "preflight.json").read_text())
    assert rehearsal["not_rehearsed"] == ""
    assert "rollout_engine/0" in {row["process"] for row in rehearsal["rehearsed"]}


LOSSES = {
    "time sharing": ("placement.placement=colocated",),
    "generation runs ahead": ("placement.placement=disaggregated", "placement.max_staleness=1"),
    "adapters alone are handed over": (
        *("training.lora.rank=4", "placement.sync_content=adapter", "algorithm.learning_rate=1e-3"),
    ),
    "adapters run ahead": (
        *("training.lora.rank=4", "placement.sync_content=adapter", "algorithm.learning_rate=1e-3"),
        *("placement.placement=disaggregated", "placement.max_staleness=2"),
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("time sharing", marks=pytest.mark.nightly),
        pytest.param("generation runs ahead", marks=pytest.mark.nightly),
        pytest.param("adapters alone are handed over", marks=pytest.mark.nightly),
        pytest.param("adapters run ahead", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_engine_comes_back_with_the_weights_of_now(how: str, tmp_path: Path) -> None:
    """Killed twice, at moments that differ from run to run; wrong weights would end a run that checks every step."""
    folder = tmp_path / "run"
    overrides = ("workload.num_steps=7", "workload.num_heldout_prompts=8", *LOSSES[how])
    process = start("run", "examples/quickstart.yaml", *overrides, "--out", str(folder))
    metrics, killed = folder / "metrics.jsonl", []
    for num_rows in (2, 4):
        wait_until(lambda least=num_rows: metrics.exists() and metrics.read_text().count("\n") >= least, 120)
        killed.append(engine_pid(folder))
        os.kill(killed[-1], signal.SIGKILL)
    children = list_descendants(process.pid)
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    assert len(set(killed)) == 2
    assert len((folder / "alarms.jsonl").read_text().splitlines()) == 2
    assert [row["step"] for row in run.metrics if row["step"] > 0] == list(range(1, 8))
    if "staleness/max" in run.metrics[-1]:
        assert max(row.get("staleness/max", 0) for row in run.metrics) <= 1
    assert alive([*killed, *children]) == []


@pytest.mark.engine
@pytest.mark.nightly
def test_an_engine_and_a_trainer_that_share_a_base_come_back_with_it(tmp_path: Path) -> None:
    """The engine opens the trainer's memory again; a lost trainer takes it along, and everything begins anew."""
    folder = tmp_path / "run"
    shares = ("placement.placement=hybrid", "placement.sync_content=adapter", "rollout.shares_base=true")
    short = ("workload.num_steps=7", "workload.num_heldout_prompts=8", "checkpoints.every=1", "hardware.num_devices=1")
    process = start("run", "examples/lora-tiny.yaml", *shares, *short, "--out", str(folder))
    metrics, trainer = folder / "metrics.jsonl", folder / "logs" / "policy_trainer-0.log"
    for num_rows in (2, 4):
        wait_until(lambda least=num_rows: metrics.exists() and metrics.read_text().count("\n") >= least, 120)
        victim = engine_pid(folder) if num_rows == 2 else int(re.findall(r"is process (\d+)", trainer.read_text())[-1])
        os.kill(victim, signal.SIGKILL)
    children = list_descendants(process.pid)
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    kinds = [json.loads(line)["kind"] for line in (folder / "alarms.jsonl").read_text().splitlines()]
    assert kinds.count("restart") == 2
    assert [row["step"] for row in run.metrics if row["step"] > 0] == list(range(1, 8))
    assert max(row.get("sync/logprob_difference_max", 0.0) for row in run.metrics) < 1e-4
    assert alive(children) == []


@pytest.mark.engine
@pytest.mark.nightly
def test_a_lost_engine_with_a_base_in_4_bits_comes_back_with_it(tmp_path: Path) -> None:
    folder, base = tmp_path / "run", tmp_path / "base"
    quantize(EXAMPLES / "models" / "sorter", base, "awq")
    packed = (f"rollout.base_path={base}", "rollout.dtype=bfloat16", "placement.sync_content=adapter")
    short = ("workload.num_steps=5", "workload.num_heldout_prompts=8")
    process = start("run", "examples/lora-tiny.yaml", *packed, *short, "--out", str(folder))
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 120)
    os.kill(engine_pid(folder), signal.SIGKILL)
    run = finish(process, folder)
    assert run.exit_code == 0, run.stderr
    assert [row["step"] for row in run.metrics if row["step"] > 0] == list(range(1, 6))
    of_engine = [sample for sample in run.trace.samples if sample.process == "rollout_engine/0" and sample.attempt > 1]
    sizes = {sample.num_bytes for sample in of_engine if sample.kind == "weights" and sample.statistic == "resident"}
    assert sizes == {473_856}, "as tests/planner/checks/test_engine_base.py works it by hand"


@pytest.mark.engine
@pytest.mark.nightly
def test_an_engine_that_dies_while_it_starts_ends_the_run_by_name(tmp_path: Path) -> None:
    """It is killed when vLLM has begun to write: before that the process only comes up, which is no action yet."""
    folder = tmp_path / "run"
    log = folder / "logs" / "rollout_engine-0.log"
    process = start("run", "examples/quickstart.yaml", "--out", str(folder))
    wait_until(lambda: log.exists() and "MainProcess" in log.read_text(), 120)
    children = list_descendants(process.pid)
    os.kill(engine_pid(folder), signal.SIGKILL)
    run = finish(process, folder)
    assert run.exit_code == 5
    assert re.search(r"error: rollout_engine/0 is gone", run.stderr)
    assert "only engines and scorers restart, after the first start" in run.stderr
    assert alive(children) == []
    assert run.status["state"] == "failed"
