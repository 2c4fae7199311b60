"""Ulysses on live DeepSpeed ranks: two ranks that share every pack compute what one rank computes alone."""

from pathlib import Path
from typing import Any

import pytest
from torch import cat

from rlplan.errors import SpecError
from rlplan.runtime.models.logprob_model import make_batch
from rlplan.runtime.models.sequence_parallel import Sharing
from rlplan.runtime.rollout.experience import SequencePair
from tests.factories import config_data, make_job, write_config
from tests.runtime.workers.trainer.agreement import alone_and_together, check_states

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"training.zero_stage": 0},
    "stage 2, recomputed": {"training.zero_stage": 2, "training.gradient_checkpointing": True},
    "stage 3": {"training.zero_stage": 3, "training.persistence_threshold": 200},
    "adapters": {"training.zero_stage": 1, "training.lora": {"rank": 4}},
    "value head": {"algorithm.name": "ppo", "roles.value.shares_backbone": True, "training.zero_stage": 2},
}
SHARED = {"training.ulysses": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Results of each case: from one rank alone, and from two ranks that share every pass."""
    return alone_and_together(CASES, SHARED, tmp_path_factory.mktemp("ranks"))


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_log_probs_gradients_and_steps_are_those_of_one_rank(results: dict[str, tuple[Any, Any]], name: str) -> None:
    alone, ranks = results[name]
    for rank in ranks:
        for own, other in zip(rank["logprobs"], alone["logprobs"], strict=True):
            assert own == pytest.approx(other, abs=1e-5)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert rank["sums"] == pytest.approx(alone["sums"], rel=1e-5)
        for own, other in zip(rank["losses"], alone["losses"], strict=True):
            assert own == pytest.approx(other, rel=1e-4, abs=1e-5)
        for tensor_name, numbers in alone["gradients"].items():
            if rank["gradients"]:
                assert rank["gradients"][tensor_name] == pytest.approx(numbers, rel=1e-4, abs=1e-6), tensor_name
    assert ranks[0]["gradients"] if name == "stage 0" else True


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_states_are_shared_over_all_ranks_as_predicted(results: dict[str, tuple[Any, Any]], name: str) -> None:
    check_states({**CASES[name], **SHARED}, results[name][1])


def test_parts_of_a_pack_are_the_pack_again() -> None:
    batch = make_batch([SequencePair((3, 4), (5, 6, 7)), SequencePair((8,), (9, 10, 11, 12, 13))])
    parts = [Sharing(None, 4, index).take_own_part(batch) for index in range(4)]
    assert {part.input_ids.shape for part in parts} == {(1, 3)}
    assert {part.sequence_lens for part in parts} == {(5, 6, 1)}
    assert cat([part.input_ids for part in parts], 1)[0, :11].tolist() == batch.input_ids[0].tolist()
    assert cat([part.targets for part in parts]).tolist() == batch.targets.tolist()
    states = cat([part.input_ids[0][part.positions] for part in parts])
    assert states.tolist() == batch.input_ids[0][batch.positions].tolist() == [4, 5, 6, 8, 9, 10, 11, 12]


def test_ranks_share_a_pass_only_where_heads_divide(tmp_path: Path) -> None:
    config = config_data(num_attention_heads=6, num_key_value_heads=3, head_dim=4)
    folder = write_config(tmp_path, **config)
    for ulysses, holds in ((1, True), (2, False), (3, True), (6, True)):
        job = make_job(**{"policy.path": str(folder), "training.ulysses": ulysses})
        if holds:
            job.load_model()
        else:
            with pytest.raises(SpecError, match="3 key heads"):
                job.load_model()
