"""trace.json: slices, counters and flows of plans, simulations and runs, read back from Chrome's trace format.

Left out: trace_processor, Perfetto's own reader: test_trace_processor.py.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlplan
from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.plan import Plan
from rlplan.report.perfetto import perfetto_trace, split_lanes
from rlplan.report.plans.forecast import forecast
from rlplan.report.plans.simulated import read_simulated_plan
from rlplan.report.run_folder import read_run_folder
from rlplan.report.timeline import TracedSchedule
from rlplan.trace import Span
from tests.factories import EXAMPLES, QUICKSTART
from tests.report.factory import make_empty_run, make_killed_run, make_run
from tests.repository.at_night import examples

FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "ts", "tid", "cat", "dur", "args"},
    "C": {"ph", "name", "pid", "ts", "args"},
    "s": {"ph", "name", "pid", "ts", "tid", "cat", "id"},
    "f": {"ph", "name", "pid", "ts", "tid", "cat", "id", "bp"},
}
"""Fields by phase. Source: Trace Event Format of the Chromium project."""


class Decoded:
    """A trace as a reader of Chrome's format sees it. Slices: (device, process, name, start, end, step), in ns."""

    def __init__(self, traced: TracedSchedule) -> None:
        events = json.loads(perfetto_trace(traced))["traceEvents"]
        assert all(event.keys() == FIELDS[event["ph"]] for event in events)
        names = [event for event in events if event["ph"] == "M"]
        self.events = [event for event in events if event["ph"] != "M"]
        assert [event["ts"] for event in self.events] == sorted(event["ts"] for event in self.events)
        self.devices = {event["pid"]: event["args"]["name"] for event in names if event["name"] == "process_name"}
        threads = {
            (event["pid"], event["tid"]): event["args"]["name"] for event in names if event["name"] == "thread_name"
        }
        self.slices: list[tuple[str, str, str, int, int, int]] = []
        self.counters: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        self.starts: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        self.ends: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        started: dict[tuple[Any, ...], str] = {}
        for event in self.events:
            at, device = round(1000 * event["ts"]), self.devices[event["pid"]]
            if event["ph"] == "C":
                self.counters[(device, event["name"])].append((at, event["args"]["bytes"]))
                continue
            thread = threads[(event["pid"], event["tid"])]
            if event["ph"] == "X":
                end = round(1000 * (event["ts"] + event["dur"]))
                self.slices.append((device, thread, event["name"], at, end, event["args"]["step"]))
                started[(event["pid"], event["tid"], at)] = event["name"]
            else:
                flows = self.starts if event["ph"] == "s" else self.ends
                flows[event["id"]].append((thread, started[(event["pid"], event["tid"], at)], at))


def list_spans(traced: TracedSchedule) -> list[tuple[str, str, int, int, int]]:
    origin = min(span.start_s for span in traced.trace.spans)
    return sorted(
        (s.device, s.action_id, round((s.start_s - origin) * 1e9), round((s.end_s - origin) * 1e9), s.step)
        for s in traced.trace.spans
    )


def simulate(plan: Plan) -> TracedSchedule:
    return read_simulated_plan(simulate_plan(plan, num_steps=3).as_json(), Path("simulation.json"))


@pytest.fixture(scope="module")
def gpu_plan() -> Plan:
    return rlplan.plan(EXAMPLES / "grpo-7b-8xh100.yaml").plan


@pytest.mark.parametrize("kind", ["planned", "simulated", "measured"])
def test_every_span_is_a_slice_on_its_device_to_the_nanosecond(kind: str, gpu_plan: Plan, tmp_path: Path) -> None:
    traced: TracedSchedule = read_run_folder(make_run(tmp_path / "run")) if kind == "measured" else (
        forecast(gpu_plan, "plan") if kind == "planned" else simulate(gpu_plan)
    )  # fmt: skip
    decoded = Decoded(traced)
    assert sorted((device, *rest) for device, _, *rest in decoded.slices) == list_spans(traced)
    processes = {name.partition(" (")[0] for _, name, *_ in decoded.slices}
    assert processes == {span.process for span in traced.trace.spans}


def test_slices_of_a_thread_follow_or_enclose_each_other(gpu_plan: Plan) -> None:
    threads = defaultdict(list)
    for device, thread, _, start, end, _ in Decoded(simulate(gpu_plan)).slices:
        threads[(device, thread)].append((start, end))
    for pairs in threads.values():
        for pair in pairs:
            assert all(other[1] <= pair[0] or other[0] >= pair[1] or encloses(pair, other) for other in pairs)


def encloses(first: tuple[int, int], other: tuple[int, int]) -> bool:
    return (first[0] <= other[0] and other[1] <= first[1]) or (other[0] <= first[0] and first[1] <= other[1])


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_overlapping_spans_get_threads_of_their_own_and_none_is_lost(pairs: list[tuple[int, int]]) -> None:
    spans = sorted((Span("a", 1, "p/0", "cpu:0", a, a + b) for a, b in pairs), key=lambda s: (s.start_s, -s.end_s))
    lanes = split_lanes(spans)
    assert sorted((s.start_s, -s.end_s) for lane in lanes for s in lane) == [(s.start_s, -s.end_s) for s in spans]
    for lane in lanes:
        for n, earlier in enumerate(lane):
            assert all(earlier.end_s <= later.start_s or later.end_s <= earlier.end_s for later in lane[n + 1 :])


def test_a_devices_predicted_counters_reach_the_peak_of_the_ledger(gpu_plan: Plan) -> None:
    peak = gpu_plan.binding
    counters = {name: points for (device, name), points in Decoded(forecast(gpu_plan, "plan")).counters.items()
                if device == peak.scope and "host" not in name}  # fmt: skip
    assert "predicted KV cache" in counters
    times = sorted({at for points in counters.values() for at, _ in points})
    total = max(sum(([0] + [v for t, v in points if t <= at])[-1] for points in counters.values()) for at in times)
    assert total == peak.num_bytes


def test_a_run_has_measured_bytes_beside_predicted_ones(tmp_path: Path) -> None:
    run = read_run_folder(make_run(tmp_path / "run"))
    counters = Decoded(run).counters
    names = {name for _, name in counters}
    assert {"measured weights", "predicted weights", "measured total"} <= names
    last = [s for s in run.trace.samples if (s.device, s.kind, s.statistic) == ("cpu:0", "weights", "resident")][-1]
    assert counters[("cpu:0", "measured weights")][-1][1] >= last.num_bytes


def test_weights_flow_from_each_sync_to_what_every_engine_generates_next(gpu_plan: Plan) -> None:
    traced = simulate(gpu_plan)
    decoded = Decoded(traced)
    engines = {span.process for span in traced.trace.spans if span.action_id.startswith("generate")}
    syncs = {span.step for span in traced.trace.spans if span.action_id.startswith("sync_weights")}
    assert decoded.starts.keys() == decoded.ends.keys()
    assert len(decoded.starts) == len(engines) * (len(syncs) - 1)  # after the last one nothing is generated
    for flow, ((_, sync, begun),) in decoded.starts.items():
        ((process, generate, used),) = decoded.ends[flow]
        assert sync.startswith("sync_weights")
        assert (generate, process.partition(" (")[0] in engines, used >= begun) == ("generate", True, True)


def test_a_killed_run_has_a_trace_and_an_empty_one_none(tmp_path: Path) -> None:
    assert Decoded(read_run_folder(make_killed_run(tmp_path / "killed"))).slices
    assert perfetto_trace(read_run_folder(make_empty_run(tmp_path / "empty"))) == ""


def test_the_same_plan_gives_the_same_bytes() -> None:
    plan = rlplan.plan(QUICKSTART).plan
    assert perfetto_trace(forecast(plan, "plan")) == perfetto_trace(forecast(plan, "plan"))
