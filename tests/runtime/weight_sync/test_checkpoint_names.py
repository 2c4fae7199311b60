"""Names of weights in checkpoints, against what transformers writes."""

import pytest
import torch

from rlplan.runtime.weight_sync.contents.checkpoint_names import rename_for_checkpoint
from tests.runtime.runs.architectures import MIXTURES, make_config


@pytest.mark.parametrize("name", [*MIXTURES, "Qwen3ForCausalLM"])
def test_weights_are_named_and_cut_as_transformers_saves_them(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = make_config(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    wanted = revert_weight_conversion(model, dict(model.named_parameters()))
    renamed = dict(rename_for_checkpoint(name, model.named_parameters()))
    assert renamed.keys() == wanted.keys()
    assert all(torch.equal(renamed[key], wanted[key]) for key in wanted)
