"""Frozen roles whose ranks share the weights (ZeRO-3): the same numbers as a whole one, a share of the bytes each."""

from collections.abc import Iterator
from typing import Any

import pytest

from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.memory.trainers.training import build_frozen_states
from rlplan.runtime.rollout.experience import SequencePair
from rlplan.runtime.workers.scorer import Scorer
from tests.factories import make_plan
from tests.repository.at_night import mark_nightly
from tests.runtime.live.live_workers import LiveWorkerGroup

SCORER = "rlplan.runtime.workers.scorer:Scorer"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
PAIRS = [SequencePair((5, 6, 7), tuple(3 + (i * j) % 12 for j in range(2 + i % 5))) for i in range(9)]
RANKS = ("scorer/reference/0", "scorer/reference/1")


class Shared:
    """Two ranks of a reference, and one that is whole, in this process: DeepSpeed is not needed for it."""

    def __init__(self, worker_group: LiveWorkerGroup) -> None:
        plan = make_plan(
            **{"training.zero_stage": 3, "training.persistence_threshold": 100, "placement.spreads_scoring": True}
        )
        self.plan, self.spec = plan, execution_spec(plan)
        self.worker_group = worker_group
        self.worker_group.begin_alike(RANKS, SCORER, ENVIRONMENT, plan.job, "reference", 1)
        model = plan.job.policy.path
        self.whole = Scorer("whole", plan.job, "reference", 1)
        self.whole.start(model)
        port = self.worker_group.gather([self.worker_group.submit(RANKS[0], "open_rendezvous", "127.0.0.1", 0)], 30.0)[
            0
        ]
        config = self.spec.deepspeed["reference"]
        starts = [
            self.worker_group.submit(name, "start_share", rank, 2, ("127.0.0.1", port), model, config)
            for rank, name in enumerate(RANKS)
        ]
        self.worker_group.gather(starts, 120.0)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        shares = self.worker_group.gather([self.worker_group.submit(name, method, *arguments) for name in RANKS], 60.0)
        return [*shares, getattr(self.whole, method)(*arguments)]

    def components(self) -> list[dict[tuple[str, str], int]]:
        return self.call("components")

    def score_pairs(self) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Scores of the shards together, of six pairs and three, and scores of the full model."""
        parts = {RANKS[0]: PAIRS[:6], RANKS[1]: PAIRS[6:]}
        calls = [self.worker_group.submit(name, "score", part, "reference") for name, part in parts.items()]
        first, second = self.worker_group.gather(calls, 60.0)
        return [*first, *second], self.whole.score(PAIRS, "reference")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    worker_group = LiveWorkerGroup(tmp_path_factory.mktemp("shared"))
    try:
        yield Shared(worker_group)
    finally:
        worker_group.close()


def same(scores: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-5) for a, b in zip(scores, other, strict=True))


def test_shares_say_what_the_whole_model_says_with_unequal_numbers_of_pairs(shards: Shared) -> None:
    together, whole = shards.score_pairs()
    assert same(together, whole)


def test_a_rank_holds_the_bytes_of_the_plan(shards: Shared) -> None:
    shards.score_pairs()
    model, training = shards.plan.job.load_model(), shards.plan.job.training
    first, second, whole = (sizes["reference", "weights"] for sizes in shards.components())
    assert first == second == build_frozen_states(training, model, 2).weight_bytes()
    assert whole == 4 * model.num_parameters
    assert first < 0.6 * whole
    rows = [
        row.resident_bytes
        for row in shards.plan.ledger.rows
        if (row.run_phase, row.action_id, row.process, row.kind) == ("steady", "score/reference", RANKS[1], "weights")
    ]
    assert rows == [first]


@pytest.mark.parametrize("destination", mark_nightly(["disk", "host"], but=1))
def test_shares_come_back_from_where_they_offloaded(shards: Shared, destination: str) -> None:
    shards.call("offload", destination)
    assert shards.components()[0]["reference", "weights"] == 0
    shards.call("reload")
    together, whole = shards.score_pairs()
    assert same(together, whole)


def test_the_bundle_has_a_config_for_each_role_that_is_shared(shards: Shared) -> None:
    spec: ExecutionSpec = shards.spec
    assert set(spec.deepspeed) == {"policy", "reference"}
    assert "optimizer" not in spec.deepspeed["reference"]
    assert shards.plan.schedule.find_layout("scorer", shards.plan.schedule.layouts[-1].role).shares_frozen_weights
