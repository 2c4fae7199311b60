"""An asynchronous step: generation waits for nothing, and a step takes what is there."""

from rlplan.dataflow.build import build_step_graph
from rlplan.dataflow.placements import add_async_rollouts
from rlplan.dataflow.schedule import AsyncRollouts
from tests.factories import make_job


def test_nothing_in_a_step_waits_for_generation_and_it_for_nothing() -> None:
    graph = add_async_rollouts(build_step_graph(make_job()), 2, interrupts=True)
    after = {call.id: call.after for call in graph.step}
    assert after["generate"] == ()
    assert all("generate" not in names for names in after.values())
    assert after["verify"] == after["score/reference"] == ("take_rollouts",)
    assert graph.async_rollouts == AsyncRollouts("generate", 2, interrupts=True)


def test_all_else_stays_as_it_is() -> None:
    before = build_step_graph(make_job())
    graph = add_async_rollouts(before, 1, interrupts=False)
    assert (graph.start, graph.finish) == (before.start, before.finish)
    assert {call.id for call in graph.step} == {call.id for call in before.step} | {"take_rollouts"}
