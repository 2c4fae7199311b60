"""Weight sync into live engines: every transport and content, from every ZeRO stage, into engines of one or two ranks.

Trainers are started once, and an engine when a case asks for it; a case restarts only the trainer's states. What
counts: the trainer's log-probs of what the engine has sampled, after it has moved on and the weights were handed over.
"""

from collections.abc import Iterator

import pytest

from rlplan.errors import RunError
from rlplan.runtime.weight_sync.channel import Update
from tests.factories import EXAMPLES
from tests.runtime.weight_sync.live_sync import Setup

pytestmark = pytest.mark.engine
SORTER = str(EXAMPLES / "models" / "sorter")
NUM_RANKS = 2
ENGINE_SIZES = (1, 2)
"""Ranks of an engine."""
ROUNDING = 1e-4
"""Between vLLM and transformers in fp32: 1e-6 to 1e-5 was seen. A step of the trainer moves 0.01 and more."""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("sync")
    live = Setup(folder, SORTER, NUM_RANKS)
    try:
        yield live
    finally:
        live.worker_group.close()


def moves(setup: Setup, stage: int, transport: str, content: str, tp: int) -> None:
    """The weights of a policy that moves arrive, update after update."""
    case = setup.case(stage, transport, content, tp)
    case.sync()
    case.train()
    stale = case.difference()
    for _ in range(2):
        case.sync()
        assert case.difference() < ROUNDING < stale
        case.train()
    assert case.weight_sync.num_resends == 0


TRANSPORTS = ("shared_memory", "gloo", "disk")
SMALL = ((1, "disk", "delta"), (2, "gloo", "full"), (3, "shared_memory", "delta"))
"""Each transport and each stage, with both contents."""


@pytest.mark.parametrize(("stage", "transport", "content"), SMALL)
def test_a_sharded_policy_moves_into_an_engine_of_two_ranks(
    setup: Setup, stage: int, transport: str, content: str
) -> None:
    """They move into one rank in every complete run."""
    moves(setup, stage, transport, content, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("tp", ENGINE_SIZES)
@pytest.mark.parametrize("content", ["full", "delta"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_transport_and_content_moves_into_engines_of_either_size(
    setup: Setup, stage: int, transport: str, content: str, tp: int
) -> None:
    moves(setup, stage, transport, content, tp)


@pytest.mark.nightly  # before a change: tests/runtime/workers/engine/test_rollout_engine.py, without trainers
def test_an_engine_whose_update_broke_off_refuses_to_generate_until_everything_was_sent_again(setup: Setup) -> None:
    case = setup.case(2, "shared_memory", "full", 1)
    case.sync()
    case.train()
    alone = Update(99, 2, False, 0.5)
    with pytest.raises(RunError, match="arrival of packet 0 did not happen"):
        case.worker_group.call(case.engines[0], "receive_weights", alone)
    with pytest.raises(RunError, match="versions are mixed"):
        case.difference()
    case.weight_sync.forget()
    case.sync()
    assert case.difference() < ROUNDING


@pytest.mark.nightly  # before a change: test_weight_sync_driver.py, into engines of torch
def test_an_update_that_fails_is_sent_once_more_over_a_new_channel_and_in_full(setup: Setup) -> None:
    case = setup.case(2, "gloo", "delta", 1)
    case.sync()
    case.train()
    with pytest.raises(RunError):  # the engine's side gives up, so that the sender finds nobody
        case.worker_group.call(case.engines[0], "receive_weights", Update(99, 2, False, 0.5))
    case.sync()
    assert case.weight_sync.num_resends == 1
    assert case.difference() < ROUNDING
