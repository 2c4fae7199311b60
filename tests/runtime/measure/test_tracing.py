"""Traces from a plain config: no network, no code of the config's, and refusals that say what is wrong."""

from functools import cache
from typing import Any

import pytest
import torch

from rlplan.errors import SpecError
from rlplan.runtime.measure.tracing import TracedPeak, trace_peak

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 96,
}


@cache
def plain() -> TracedPeak:
    return trace_peak(CONFIG, 64)


def test_a_trace_counts_parameters_and_gradients_to_the_byte() -> None:
    peak = plain()
    numel = 2 * 96 * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64
    assert peak.parameters == 2 * numel
    assert peak.num_bytes > peak.parameters + peak.end_of_forward
    assert torch.get_default_dtype() == torch.float32


def test_a_pass_without_gradient_has_none() -> None:
    peak = trace_peak(CONFIG, 64, has_gradient=False)
    assert peak.gradients == 0
    assert peak.rest < plain().rest


def test_code_that_a_config_names_is_never_looked_at() -> None:
    hostile = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    hostile |= {"trust_remote_code": True, "_name_or_path": "evil/model", "quantization_config": {"quant_method": "x"}}
    assert trace_peak(CONFIG | hostile, 64) == plain()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": -64}, ""),
        ({"num_attention_heads": 0}, ""),
        ({"model_type": "clip", "architectures": None}, "clip"),
    ],
)
def test_what_transformers_cannot_build_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"transformers cannot (build|run) this config(.|\n)*{message}(.|\n)*way out"):
        trace_peak(CONFIG | changes, 64)


def test_a_family_that_needs_values_is_refused() -> None:
    import transformers

    kind = transformers.DeepseekV32Config(num_hidden_layers=1)
    with pytest.raises(SpecError, match=r"transformers cannot run this config(.|\n)*deepseek_v32"):
        trace_peak(kind.to_dict(), 64)


def test_an_architecture_that_is_no_language_model_falls_back_to_its_model_type() -> None:
    assert trace_peak(CONFIG | {"architectures": ["os.system"]}, 64) == plain()
