"""The keys that tests have as data are those of the engines that are installed."""

import pytest

from rlplan.errors import EmitError
from rlplan.runtime.host.engine_keys import check_deepspeed, check_vllm
from tests.emit.known_keys import installed_keys, known_keys

pytestmark = pytest.mark.engine


def test_the_recorded_keys_are_those_of_the_installed_engines() -> None:
    assert installed_keys() == known_keys()


def test_a_key_that_an_installed_engine_does_not_know_is_refused() -> None:
    with pytest.raises(EmitError, match="overlap_com"):
        check_deepspeed({"zero_optimization": {"overlap_com": True}}, "deepspeed/policy.json")
    with pytest.raises(EmitError, match="max_num_seq"):
        check_vllm({"max_num_seq": 8}, "vllm/policy.json")
