"""trace.pftrace, decoded by protobuf's own decoder from Perfetto's published field numbers: slices, counters, flows.

At night also by the descriptors that Perfetto itself publishes (the `perfetto` package), which must know every field.
Left out: trace_processor, Perfetto's own reader: test_trace_processor.py.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

import rlplan
from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.plan import Plan
from rlplan.report.perfetto import lanes_of, perfetto_trace
from rlplan.report.plans.forecast import forecast
from rlplan.report.plans.simulated import read_simulated_plan
from rlplan.report.run_folder import read_run_folder
from rlplan.report.timeline import TracedSchedule
from rlplan.trace import Span
from tests.factories import EXAMPLES, QUICKSTART, ROOT
from tests.report.factory import make_empty_run, make_killed_run, make_run
from tests.repository.at_night import examples

FIELD = descriptor_pb2.FieldDescriptorProto
INT32, INT64, UINT32, UINT64 = FIELD.TYPE_INT32, FIELD.TYPE_INT64, FIELD.TYPE_UINT32, FIELD.TYPE_UINT64
FIXED64, STRING = FIELD.TYPE_FIXED64, FIELD.TYPE_STRING
BEGIN, END, COUNTER = 1, 2, 4
MESSAGES: dict[str, dict[str, tuple[int, Any]]] = {
    "Trace": {"packet": (1, ["TracePacket"])},
    "TracePacket": {
        "timestamp": (8, UINT64),
        "trusted_packet_sequence_id": (10, UINT32),
        "track_event": (11, "TrackEvent"),
        "track_descriptor": (60, "TrackDescriptor"),
    },
    "TrackDescriptor": {
        "uuid": (1, UINT64),
        "name": (2, STRING),
        "process": (3, "ProcessDescriptor"),
        "thread": (4, "ThreadDescriptor"),
        "parent_uuid": (5, UINT64),
        "counter": (8, "CounterDescriptor"),
    },
    "ProcessDescriptor": {"pid": (1, INT32), "process_name": (6, STRING)},
    "ThreadDescriptor": {"pid": (1, INT32), "tid": (2, INT64), "thread_name": (5, STRING)},
    "CounterDescriptor": {"unit": (3, INT32)},
    "TrackEvent": {
        "debug_annotations": (4, ["DebugAnnotation"]),
        "type": (9, INT32),
        "track_uuid": (11, UINT64),
        "categories": (22, [STRING]),
        "name": (23, STRING),
        "counter_value": (30, INT64),
        "flow_ids": (47, [FIXED64]),
        "terminating_flow_ids": (48, [FIXED64]),
    },
    "DebugAnnotation": {"name": (10, STRING), "int_value": (4, INT64)},
}
"""Of google/perfetto, protos/perfetto/trace/trace_packet.proto and track_event/*.proto: (number, type), or repeated."""


def make_decoder() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="trace.proto", package="t", syntax="proto2")
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            label = FIELD.LABEL_REPEATED if isinstance(kind, list) else FIELD.LABEL_OPTIONAL
            kind = kind[0] if isinstance(kind, list) else kind
            if isinstance(kind, str):
                made.field.add(name=key, number=number, label=label, type=FIELD.TYPE_MESSAGE, type_name=f".t.{kind}")
            else:
                made.field.add(name=key, number=number, label=label, type=kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Trace"))


DECODER = make_decoder()


class Decoded:
    """A trace as a reader of Perfetto sees it. Slices: (device, process, name, start, end, step), times in ns."""

    def __init__(self, traced: TracedSchedule) -> None:
        trace = DECODER.FromString(perfetto_trace(traced))
        assert not trace.FindInitializationErrors()
        tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
        self.events = [(p.timestamp, p.track_event) for p in trace.packet if p.HasField("track_event")]
        assert len(tracks) + len(self.events) == len(trace.packet)
        assert [at for at, _ in self.events] == sorted(at for at, _ in self.events)
        self.devices = {t.process.pid: t.process.process_name for t in tracks.values() if t.HasField("process")}
        self.slices: list[tuple[str, str, str, int, int, int]] = []
        self.counters: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        self.starts: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        self.ends: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        opened: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        for at, event in self.events:
            track = tracks[event.track_uuid]
            if event.type == COUNTER:
                assert track.counter.unit == 3
                device = tracks[track.parent_uuid].process.process_name
                self.counters[(device, track.name)].append((at, event.counter_value))
            elif event.type == BEGIN:
                opened[track.uuid].append((at, event))
                place = (track.thread.thread_name, event.name, at)
                for flow in event.flow_ids:
                    self.starts[flow].append(place)
                for flow in event.terminating_flow_ids:
                    self.ends[flow].append(place)
            else:
                start, begun = opened[track.uuid].pop()  # the innermost ends first
                notes = {one.name: one.int_value for one in begun.debug_annotations}
                device = self.devices[track.thread.pid]
                self.slices.append((device, track.thread.thread_name, begun.name, start, at, notes["step"]))
        assert not any(opened.values())


def spans_of(traced: TracedSchedule) -> list[tuple[str, str, int, int, int]]:
    origin = min(span.start_s for span in traced.trace.spans)
    return sorted(
        (s.device, s.action_id, round((s.start_s - origin) * 1e9), round((s.end_s - origin) * 1e9), s.step)
        for s in traced.trace.spans
    )


def simulated(plan: Plan) -> TracedSchedule:
    return read_simulated_plan(simulate_plan(plan, num_steps=3).as_json(), Path("simulation.json"))


@pytest.fixture(scope="module")
def gpu_plan() -> Plan:
    return rlplan.plan(EXAMPLES / "grpo-7b-8xh100.yaml").plan


@pytest.mark.parametrize("kind", ["planned", "simulated", "measured"])
def test_every_span_is_a_slice_on_its_device_to_the_nanosecond(kind: str, gpu_plan: Plan, tmp_path: Path) -> None:
    traced: TracedSchedule = read_run_folder(make_run(tmp_path / "run")) if kind == "measured" else (
        forecast(gpu_plan, "plan") if kind == "planned" else simulated(gpu_plan)
    )  # fmt: skip
    decoded = Decoded(traced)
    assert sorted((device, *rest) for device, _, *rest in decoded.slices) == spans_of(traced)
    processes = {name.partition(" (")[0] for _, name, *_ in decoded.slices}
    assert processes == {span.process for span in traced.trace.spans}


def test_slices_of_a_thread_follow_or_enclose_each_other(gpu_plan: Plan) -> None:
    threads = defaultdict(list)
    for device, thread, _, start, end, _ in Decoded(simulated(gpu_plan)).slices:
        threads[(device, thread)].append((start, end))
    for mine in threads.values():
        for one in mine:
            assert all(other[1] <= one[0] or other[0] >= one[1] or encloses(one, other) for other in mine)


def encloses(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return (one[0] <= other[0] and other[1] <= one[1]) or (other[0] <= one[0] and one[1] <= other[1])


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_overlapping_spans_get_threads_of_their_own_and_none_is_lost(pairs: list[tuple[int, int]]) -> None:
    spans = sorted((Span("a", 1, "p/0", "cpu:0", a, a + b) for a, b in pairs), key=lambda s: (s.start_s, -s.end_s))
    lanes = lanes_of(spans)
    assert sorted((s.start_s, -s.end_s) for lane in lanes for s in lane) == [(s.start_s, -s.end_s) for s in spans]
    for lane in lanes:
        for n, one in enumerate(lane):
            assert all(one.end_s <= later.start_s or later.end_s <= one.end_s for later in lane[n + 1 :])


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
    traced = simulated(gpu_plan)
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
    assert perfetto_trace(read_run_folder(make_empty_run(tmp_path / "empty"))) == b""


def test_the_same_plan_gives_the_same_bytes() -> None:
    plan = rlplan.plan(QUICKSTART).plan
    assert perfetto_trace(forecast(plan, "plan")) == perfetto_trace(forecast(plan, "plan"))


OFFICIAL = """
import json, sys
from google.protobuf.json_format import MessageToDict
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

def unknown(message):
    for field, value in message.ListFields():
        several = value if field.is_repeated else [value]
        yield from (one for part in several if field.message_type for one in unknown(part))
    yield from (one.field_number for one in UnknownFieldSet(message))

trace = perfetto_trace_pb2.Trace.FromString(sys.stdin.buffer.read())
assert not list(unknown(trace)) and trace.IsInitialized()
print(json.dumps(MessageToDict(trace, preserving_proto_field_name=True, use_integers_for_enums=True)))
"""


@pytest.mark.nightly
def test_perfettos_own_descriptors_read_what_ours_read(gpu_plan: Plan, tmp_path: Path) -> None:
    pinned = next(line for line in (ROOT / "requirements" / "upstream.txt").read_text().split() if "perfetto" in line)
    where = str(tmp_path / "perfetto")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", where, pinned]
    subprocess.run(install, check=True)
    run = read_run_folder(make_run(tmp_path / "run"))
    for traced in (forecast(gpu_plan, "plan"), simulated(gpu_plan), run):
        written = perfetto_trace(traced)
        paths = os.pathsep.join([where, *filter(None, sys.path)])
        done = subprocess.run([sys.executable, "-c", OFFICIAL], input=written, capture_output=True,
                              check=True, env=os.environ | {"PYTHONPATH": paths})  # fmt: skip
        ours = MessageToDict(DECODER.FromString(written), preserving_proto_field_name=True, use_integers_for_enums=True)
        assert json.loads(done.stdout) == ours
        assert len(ours["packet"]) > 10
