"""The `training:` part of a job: models that several ranks can compute together."""

import pytest

from rlplan.spec.model import model_from_config
from rlplan.spec.parts.training import find_sharing_conflicts
from tests.runtime.runs.architectures import make_config

UNCUT = ("Phi3ForCausalLM", "Olmo2ForCausalLM", "Glm4ForCausalLM", "Starcoder2ForCausalLM", "MixtralForCausalLM")


@pytest.mark.parametrize("name", UNCUT)
def test_layers_that_autotp_does_not_cut_refuse_tensor_parallel_training_alone(name: str) -> None:
    model = model_from_config(make_config(name), where=name)
    assert any("layers that AutoTP does not cut" in refusal.what for refusal in find_sharing_conflicts(model, 1, 2))
    assert not list(find_sharing_conflicts(model, 2, 1))


def test_layers_named_as_llama_s_are_cut() -> None:
    assert not list(find_sharing_conflicts(model_from_config(make_config("GemmaForCausalLM"), where="here"), 1, 2))
