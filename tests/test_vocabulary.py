"""Vocabulary: the words of DESIGN.md, spelled once."""

from enum import StrEnum

import pytest

from rlplan import vocabulary
from rlplan.vocabulary import PERSISTENT_KINDS, Dtype, MemoryKind, Phase, Placement, Provenance, Role

ENUMS = [value for value in vars(vocabulary).values() if isinstance(value, type) and issubclass(value, StrEnum)]


@pytest.mark.parametrize("enum", [enum for enum in ENUMS if enum not in (StrEnum,)], ids=lambda enum: enum.__name__)
def test_a_word_is_written_as_its_name_in_lower_case(enum: type[StrEnum]) -> None:
    assert [str(word) for word in enum] == [word.name.lower() for word in enum]


def test_the_roles_phases_placements_and_kinds_are_those_of_the_design() -> None:
    assert set(Role) == {"policy", "reference", "reward", "value", "teacher", "verifier"}
    assert {"rollout", "score", "train", "sync", "switch"} <= set(Phase)
    assert set(Placement) == {"colocated", "hybrid", "disaggregated"}
    design = (
        "WEIGHTS GRADIENTS MASTER_WEIGHTS OPTIMIZER ACTIVATIONS LOGITS KV_CACHE CUDA_GRAPHS CONTEXT COMM_BUFFERS "
        "SYNC_STAGING CHECKPOINT_STAGING PACKED_WEIGHTS FRAGMENTATION PROCESS"
    )
    assert {kind.name for kind in MemoryKind} == set(design.split())


def test_provenance_goes_from_the_strongest_to_the_weakest() -> None:
    assert list(Provenance) == ["measured", "datasheet", "derived", "assumed"]


def test_what_must_be_predicted_exactly_is_what_engines_hold_between_actions() -> None:
    states = {"weights", "gradients", "master_weights", "optimizer"}
    assert set(PERSISTENT_KINDS) == states | {"kv_cache", "checkpoint_staging"}


def test_a_dtype_knows_the_bytes_of_an_element() -> None:
    assert {dtype.value: dtype.num_bytes for dtype in Dtype} == {"float32": 4, "bfloat16": 2, "float16": 2}
