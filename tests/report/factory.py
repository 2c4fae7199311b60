"""Run folders made by hand: a plan with a ledger of known bytes, and a trace that is off by a known fraction.

In: how the run went. Out: the files that `rlplan run` leaves, in a temporary folder.
Left out: engines. The schedule is the library's own; bytes and seconds are invented, so that tests know each number.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.schedule import DRIVER_PROCESS, HOST_DEVICE, Action, Schedule
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.planner.plan import Plan, write_plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.resolve import read_choice
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import resolve_on_cpu
from rlplan.trace import MemorySample, Span, record_line
from rlplan.units import GIB, MIB
from rlplan.vocabulary import PERSISTENT_KINDS, ActionKind, MemoryKind, Placement, Provenance, Role

HOST_PROCESSES = {DRIVER_PROCESS: 200 * MIB, "ray_system": 560 * MIB}
UNPACKED = MIB
"""Engine weights that stay tensors after packing."""

TOTAL_FACTOR, BASELINE_FACTOR = 0.95, 0.96
"""Measured totals and baselines are these parts of the predicted ones: a prediction is 5.26 % above its total."""

PARAMS = {"tiny": 3 * MIB, "large": 500 * MIB}
BASELINES = {"policy_trainer": 640 * MIB, "scorer": 480 * MIB, "rollout_engine": 700 * MIB}
SECONDS = {
    ActionKind.START_TRAINER: 11.0,
    ActionKind.START_ENGINE: 16.0,
    ActionKind.START_SCORER: 7.0,
    ActionKind.GENERATE: 1.4,
    ActionKind.VERIFY: 0.05,
    ActionKind.SCORE: 0.4,
    ActionKind.COMPUTE_ADVANTAGES: 0.01,
    ActionKind.TRAIN_FORWARD_BACKWARD: 0.9,
    ActionKind.OPTIMIZER_STEP: 0.12,
    ActionKind.SYNC_WEIGHTS: 0.25,
    ActionKind.EVALUATE: 1.1,
    ActionKind.CHECKPOINT: 0.3,
}


@dataclass(frozen=True)
class RunShape:
    """How a made-up run went. stops_after: the last RL step that was done; None for all of them."""

    name: str = "quickstart"
    seed: int = 0
    learning_rate: float = 3e-4
    shuffle_rewards: bool = False
    num_steps: int = 6
    num_devices: int = 2
    size: str = "tiny"
    state: str = "finished"
    message: str = ""
    stops_after: int | None = None
    capacity: int = 16 * GIB
    rewards: tuple[dict[str, str], ...] = ({"kind": "answer_matcher"},)


def make_run(folder: Path, shape: RunShape = RunShape()) -> Path:
    """Write a whole run folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(shape, folder)
    write_plan(plan, folder / "plan.json")
    (folder / "trace.jsonl").write_text("\n".join(_trace_lines(plan, shape)) + "\n")
    _write_rows(folder / "metrics.jsonl", _metric_rows(shape))
    _write_rows(folder / "timings.jsonl", _timing_rows(plan, shape))
    status = {
        "state": shape.state,
        "exit_code": 0 if shape.state == "finished" else 5,
        "message": shape.message,
        "started_at": "2026-01-02T03:04:05+00:00",
        "seconds": 93.5,
    }
    (folder / "status.json").write_text(json.dumps(status))
    return folder


OWN_REWARD = {"kind": "function", "path": "rewards.py:length_score", "name": "length_score"}
"""A reward of a user's own: no share of anything, so that its values may be any number."""


def make_run_with_own_reward(folder: Path, shape: RunShape = RunShape(rewards=(OWN_REWARD,))) -> Path:
    """A run that nothing but a function of the user's own judges: its one evaluation goes from -3 upwards."""
    make_run(folder, shape)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("evaluate/format_accuracy", None)
        if "evaluate/greedy_accuracy" in row:
            row["evaluate/length_score"] = 10 * row.pop("evaluate/greedy_accuracy") - 5.5
    _write_rows(folder / "metrics.jsonl", rows)
    return folder


def make_killed_run(folder: Path) -> Path:
    """A run that was killed in its second step: torn last lines, no evaluation, no status."""
    make_run(folder, RunShape(stops_after=2))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if "evaluate" not in key} for row in rows if row["step"] > 0]
    _write_rows(folder / "metrics.jsonl", kept)
    for name in ("trace.jsonl", "metrics.jsonl", "timings.jsonl"):
        text = (folder / name).read_text().rstrip()
        (folder / name).write_text(text[:-17])
    (folder / "status.json").unlink()
    return folder


def make_empty_run(folder: Path) -> Path:
    """A run that failed before it measured anything."""
    make_run(folder, RunShape(state="failed", message="no room at '/srv/me/runs/7/plan.json'"))
    for name in ("trace.jsonl", "metrics.jsonl", "timings.jsonl"):
        (folder / name).unlink()
    return folder


def make_plan(shape: RunShape, folder: Path) -> Plan:
    """A plan whose schedule is the library's own and whose ledger is made by hand."""
    asked = JobSpec.model_validate(
        {
            "name": shape.name,
            "seed": shape.seed,
            "policy": {"path": str(folder / "policy")},
            "hardware": {"profile": "cpu-host", "num_devices": shape.num_devices},
            "algorithm": {"name": "grpo", "learning_rate": shape.learning_rate},
            "data": {"prompts": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
            "workload": {
                "num_steps": shape.num_steps,
                "num_prompts_per_step": 32,
                "num_samples_per_prompt": 8,
                "mini_batch_size": 256,
                "micro_batch_size_per_gpu": 32,
                "max_prompt_len": 16,
                "max_response_len": 32,
                "evaluate_every": 2 if shape.num_steps < 20 else 10,
            },
            "rewards": list(shape.rewards),
            "controls": {"shuffle_rewards": shape.shuffle_rewards},
        }
    )
    job = resolve_on_cpu(asked)
    placement = Placement.DISAGGREGATED if shape.num_devices > 1 else Placement.HYBRID
    choice = read_choice(job, placement, 2)
    schedule = build_schedule(job, choice)
    ledger = _ledger(schedule, shape)
    return Plan(asked=asked, job=job, choice=choice, schedule=schedule, ledger=ledger, fit=Verdict.FITS)


def _ledger(schedule: Schedule, shape: RunShape) -> MemoryLedger:
    first = schedule.start[0]
    rows = [
        _row("start", first, process, HOST_DEVICE, MemoryKind.PROCESS, (size, size))
        for process, size in HOST_PROCESSES.items()
    ]
    order: list[tuple[RunPhase, str]] = []
    has_adam: set[str] = set()
    for run_phase, actions in _moments(schedule):
        for action in actions:
            order.append((run_phase, action.id))
            for process, device in _processes(schedule, action):
                if action.kind is ActionKind.OPTIMIZER_STEP:
                    has_adam.add(process)
                sizes = _size_kinds(process, action, PARAMS[shape.size], process in has_adam)
                rows += [_row(run_phase, action, process, device, kind, size) for kind, size in sizes.items()]
    beside = tuple(("step", "verify", action.id) for action in schedule.step if action.kind is ActionKind.SCORE)
    return MemoryLedger(tuple(rows), shape.capacity, shape.capacity, True, tuple(order), beside)


def _moments(schedule: Schedule) -> Iterator[tuple[RunPhase, tuple[Action, ...]]]:
    yield from (("start", schedule.start), ("first", schedule.step), ("steady", schedule.step))
    yield ("finish", schedule.finish)


def _processes(schedule: Schedule, action: Action) -> list[tuple[str, str]]:
    devices = dict(schedule.processes)
    return [(process, devices[process]) for process in action.processes]


def _size_kinds(process: str, action: Action, params: int, has_adam: bool) -> dict[MemoryKind, tuple[int, int]]:
    """(resident, peak) bytes of each kind after and inside an action."""
    worker = process.split("/")[0]
    sizes = {MemoryKind.PROCESS: (BASELINES[worker],) * 2, MemoryKind.WEIGHTS: (params, params)}
    if worker == "policy_trainer":
        sizes |= dict.fromkeys((MemoryKind.GRADIENTS, MemoryKind.MASTER_WEIGHTS), (params, params))
        sizes[MemoryKind.OPTIMIZER] = (2 * params, 2 * params) if has_adam else (0, 0)
        sizes[MemoryKind.COMM_BUFFERS] = (0, params // 2 if action.kind is ActionKind.OPTIMIZER_STEP else 0)
    if worker == "rollout_engine":
        loading = params if action.kind is ActionKind.START_ENGINE else UNPACKED
        sizes |= {MemoryKind.PACKED_WEIGHTS: (params, params), MemoryKind.KV_CACHE: (64 * MIB, 64 * MIB)}
        sizes[MemoryKind.WEIGHTS] = (UNPACKED, loading)
    if action.kind in (ActionKind.TRAIN_FORWARD_BACKWARD, ActionKind.SCORE):
        sizes |= {MemoryKind.ACTIVATIONS: (0, 30 * MIB + params), MemoryKind.LOGITS: (0, 12 * MIB + params // 3)}
    if action.kind is ActionKind.SYNC_WEIGHTS:
        sizes[MemoryKind.SYNC_STAGING] = (0, min(64 * MIB, params))
    return sizes


def _row(
    run_phase: RunPhase, action: Action, process: str, device: str, kind: MemoryKind, size: tuple[int, int]
) -> LedgerRow:
    resident, peak = size
    role = Role.REFERENCE if process.startswith("scorer") else Role.POLICY
    space = "host" if device == HOST_DEVICE else "device"
    loaded = peak if kind is MemoryKind.WEIGHTS and action.kind is ActionKind.START_ENGINE else 0
    return LedgerRow(run_phase, action.id, action.phase, process, device, role, kind, space, resident, peak,
                     Provenance.DERIVED, "tests.report.factory", loaded)  # fmt: skip


def _trace_lines(plan: Plan, shape: RunShape) -> Iterator[str]:
    yield json.dumps({"type": "trace", "schema_version": 1, "origin": "measured"})
    now = 2.0
    for step, actions in _steps_done(plan, shape):
        ends = {action.id: now for action in actions}
        for action in (action for action in actions if action.runs_in_step(step)):
            start = max([now, *(ends[before] for before in action.after)])
            ends[action.id] = start + SECONDS[action.kind] * (1 + 0.08 * math.sin(step + 1))
            for index, (process, device) in enumerate(_processes(plan.schedule, action)):
                end = ends[action.id] - 0.004 * index
                yield record_line(Span(action.id, step, process, device, start, end))
                yield from _samples(plan, (action.id, step, process, device), end)
        now = max(ends.values()) + 0.01
        for process, size in HOST_PROCESSES.items():
            parts = ("host", "total", "resident", int(size * TOTAL_FACTOR), now)
            yield record_line(MemorySample("finish_step", step, process, HOST_DEVICE, *parts))


def _steps_done(plan: Plan, shape: RunShape) -> Iterator[tuple[int, tuple[Action, ...]]]:
    yield 0, plan.schedule.start
    last = shape.num_steps if shape.stops_after is None else shape.stops_after
    yield from ((step, plan.schedule.step) for step in range(1, last + 1))
    if shape.stops_after is None:
        yield -1, plan.schedule.finish


def _samples(plan: Plan, where: tuple[str, int, str, str], at_s: float) -> Iterator[str]:
    action_id, step, process, device = where
    run_phase = {0: "start", 1: "first", -1: "finish"}.get(step, "steady")
    rows = [
        row
        for row in plan.ledger.rows
        if (row.run_phase, row.action_id, row.process) == (run_phase, action_id, process)
    ]
    for row in rows:
        if row.kind in PERSISTENT_KINDS or row.kind is MemoryKind.PACKED_WEIGHTS:
            parts = (str(row.role), str(row.kind), "resident", row.resident_bytes, at_s)
            yield record_line(MemorySample(action_id, step, process, device, *parts))
        if row.kind is MemoryKind.PROCESS and action_id.startswith("start"):
            parts = (str(row.role), "process", "resident", int(row.resident_bytes * BASELINE_FACTOR), at_s)
            yield record_line(MemorySample(action_id, step, process, device, *parts))
        if row.kind is MemoryKind.WEIGHTS and action_id == "start_engine":
            parts = (str(row.role), "weights", "loaded", row.loaded_bytes, at_s)
            yield record_line(MemorySample(action_id, step, process, device, *parts))
    for statistic in ("resident", "peak"):
        size = sum(row.peak_bytes if statistic == "peak" else row.resident_bytes for row in rows)
        parts = ("policy", "total", statistic, int(size * TOTAL_FACTOR), at_s)
        yield record_line(MemorySample(action_id, step, process, device, *parts))


def _metric_rows(shape: RunShape) -> list[dict[str, float]]:
    learns = shape.learning_rate > 0 and not shape.shuffle_rewards
    last = shape.num_steps if shape.stops_after is None else shape.stops_after
    rows: list[dict[str, float]] = [{"step": 0, "evaluate/greedy_accuracy": 0.25, "evaluate/format_accuracy": 0.9}]
    for step in range(1, last + 1):
        done = step / shape.num_steps
        wave = math.sin(7.3 * step + shape.seed + 2 * shape.shuffle_rewards)
        accuracy = 0.25 + (0.72 - 0.01 * shape.seed) * (1 - math.exp(-4 * done)) if learns else 0.25 + 0.01 * wave
        row = {
            "step": step,
            "reward/mean": 0.3 + (0.9 * accuracy - 0.2) + 0.03 * wave,
            "reward/std": 0.45 * (1 - 0.6 * accuracy),
            "reward/min": 0.0,
            "reward/max": 1.2,
            "reward/answer_matcher/mean": accuracy,
            "kl/mean": 0.08 * done + 0.004 * abs(wave) if learns else 0.0,
            "kl/max": 0.5 * done,
            "policy/entropy": 1.2 - 0.8 * done + 0.03 * wave,
            "policy/clip_fraction": 0.02 + 0.01 * abs(wave),
            "policy/loss": 0.01 * wave,
            "policy/grad_norm": 1.0 + 0.2 * wave,
            "policy/ratio_max": 1.3 + 0.1 * wave,
            "sync/logprob_difference_max": 5e-7 * (1.5 + wave),
            "response_len/mean": 11.0 + wave,
            "group_variance_zero_fraction": 0.1 + 0.6 * done,
        }
        if step % (2 if shape.num_steps < 20 else 10) == 0 or step == shape.num_steps:
            row |= {"evaluate/greedy_accuracy": accuracy, "evaluate/format_accuracy": 0.97}
        rows.append(row)
    return rows


def _timing_rows(plan: Plan, shape: RunShape) -> list[dict[str, float]]:
    rows = []
    for step, actions in _steps_done(plan, shape):
        if step != 0:
            seconds = {f"seconds/{action.id}": SECONDS[action.kind] for action in actions if action.runs_in_step(step)}
            total = sum(seconds.values())
            rows.append(
                {"step": step, "step_s": total, "throughput/tokens_per_sec": 9000 + 40 * math.sin(step), **seconds}
            )
            rows[-1]["memory/host_total_bytes"] = 3 * GIB
    return rows


def _write_rows(path: Path, rows: list[dict[str, float]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
