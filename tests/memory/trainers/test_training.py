"""ZeRO-2: persistent bytes of a rank, worked by hand on the model of the factories.

Offsets in the flat buffer (elements): embedding 0-560; layer 0: q 560-656, k -704, v -752, o -848, q norm -851,
k norm -854, gate -1014, up -1174, down -1334, norms -1342 and -1350; layer 1 the same from 1350: q -1446, ..., o -1638,
q norm -1641, k norm -1644, gate -1804, ..., norms -2140; last norm -2148.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.memory.trainers.training import build_trained_rank
from rlplan.memory.trainers.zero import ZeroStates
from rlplan.spec.model import ModelSpec
from tests.factories import make_job, make_model


def build_rank(num_ranks: int, rank: int = 0, model: ModelSpec | None = None) -> ZeroStates:
    return build_trained_rank(make_job().training, model or make_model(), 2, num_ranks, rank).states


@pytest.mark.parametrize(
    ("num_ranks", "flat", "partition"),
    [(1, 2148, 2148), (2, 2148, 1074), (3, 2148, 716), (4, 2152, 538), (5, 2150, 430), (7, 2156, 308)],
)
def test_the_flat_buffer_is_a_multiple_of_twice_the_ranks(num_ranks: int, flat: int, partition: int) -> None:
    zero = build_rank(num_ranks)
    assert (zero.partition_numel * num_ranks, zero.partition_numel) == (flat, partition)
    assert zero.weight_bytes() == 4 * flat
    assert zero.master_bytes() == 4 * partition
    assert zero.optimizer_bytes == 8 * partition + 4


@pytest.mark.parametrize(
    ("num_ranks", "elements"),
    [
        (1, [2148]),
        (2, [1174, 2148 - 1014]),  # 1074 lies in layer 0's up: both keep it whole
        (3, [752, 1446 - 704, 2148 - 1350]),  # 716 lies in layer 0's v, 1432 in layer 1's q
        (5, [560, 1014, 1334 - 854, 1804 - 1174, 2148 - 1644]),  # the embedding is cut: both its ranks keep it whole
    ],
)
def test_gradients_of_parameters_at_a_border_are_kept_whole_by_both_ranks(num_ranks: int, elements: list[int]) -> None:
    assert [build_rank(num_ranks, rank).gradient_bytes() for rank in range(num_ranks)] == [4 * n for n in elements]


def test_the_names_at_the_border_are_on_both_sides() -> None:
    first, second = ({parameter.name for parameter in build_rank(2, rank).owned} for rank in range(2))
    assert first & second == {"model.layers.0.mlp.up_proj.weight"}
    assert first | second == {parameter.name for parameter in make_model().parameters}


@given(st.integers(1, 64), st.integers(1, 4), st.booleans())
def test_partitions_cover_every_parameter_and_little_more(num_ranks: int, num_layers: int, tied: bool) -> None:
    model = make_model(num_layers=num_layers, has_tied_embeddings=tied)
    ranks = [build_rank(num_ranks, rank, model) for rank in range(num_ranks)]
    assert {parameter for zero in ranks for parameter in zero.owned} == set(model.parameters)
    assert sum(zero.master_bytes() for zero in ranks) == ranks[0].weight_bytes()
    assert 0 <= ranks[0].weight_bytes() - 4 * model.num_parameters < 4 * 2 * num_ranks
    largest = max(parameter.numel for parameter in model.parameters)
    for zero in ranks:
        assert zero.gradient_bytes() <= 4 * (zero.partition_numel + 2 * largest)


@given(st.integers(1, 32))
def test_more_ranks_never_need_more_a_rank(num_ranks: int) -> None:
    fewer, more = build_rank(num_ranks), build_rank(2 * num_ranks)
    assert more.partition_numel <= fewer.partition_numel
    assert more.optimizer_bytes <= fewer.optimizer_bytes
