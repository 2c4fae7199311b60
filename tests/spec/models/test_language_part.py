"""The language part of vision-language models: its sizes and tensors, by the catalogue's configs."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.planner.rules import find_job_refusals
from rlplan.spec.model import Component, load_model, model_from_config
from rlplan.spec.models.catalogue import load_catalogue
from rlplan.spec.models.language_part import decoder_name, language_config
from tests.factories import gpu_job, make_job

RUN = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen2ForCausalLM",
    "Qwen/Qwen3-VL-2B-Instruct": "Qwen3ForCausalLM",
    "google/gemma-3-4b-it": "Gemma3ForCausalLM",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "MistralForCausalLM",
}
REFUSED = ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3.5-27B", "google/gemma-4-26B-A4B", "moonshotai/Kimi-K2.5")


@pytest.mark.parametrize(("name", "architecture"), RUN.items())
def test_the_language_part_is_the_whole_model_without_its_tower(name: str, architecture: str) -> None:
    whole, part = model_from_config(load_catalogue()[name].config, where=name), load_model(Path("models") / name)
    assert part.architecture == architecture
    tower = whole.numel_by_component[Component.VISION]
    assert tower > 100_000_000
    assert part.num_parameters == whole.num_parameters - tower
    named = {decoder_name(tensor.name) or "": tensor.shape for tensor in whole.tensors}
    assert {tensor.name: tensor.shape for tensor in part.tensors} == {n: s for n, s in named.items() if n}


@pytest.mark.parametrize("name", REFUSED)
def test_other_vision_language_models_are_refused_by_name(name: str) -> None:
    with pytest.raises(SpecError, match="ForConditionalGeneration' can be planned but not run"):
        load_model(Path("models") / name)


def test_positions_on_three_axes_become_plain_ones_and_stretched_ones_stay_stretched() -> None:
    old = {"type": "mrope", "mrope_section": [16, 24, 24]}
    new = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    flat = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "rope_theta": 2e6, "vision_start_token_id": 5}
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {"rope_parameters": new}}
    assert language_config(flat | {"rope_scaling": old}).keys().isdisjoint({"rope_scaling", "vision_start_token_id"})
    assert language_config(flat)["rope_theta"] == 2e6
    assert language_config(nested)["rope_parameters"] == {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e6}


def test_a_vision_language_model_runs_as_the_policy_alone_and_on_a_cpu_host_alone() -> None:
    path = "models/Qwen/Qwen2.5-VL-3B-Instruct"
    as_policy, as_reference = make_job(**{"policy.path": path}), make_job(roles={"reference": {"path": path}})
    on_gpus = gpu_job({"policy": "Qwen/Qwen2.5-VL-3B-Instruct", "hardware": "8xH100", "algorithm": "grpo"})
    for job, why in (
        (as_reference, "roles.reference.path: only the policy can be a vision-language model"),
        (on_gpus, "policy.path: a vision-language policy is tested on CPU hosts only"),
    ):
        assert why in " ".join(find_job_refusals(job))
    assert not [reason for reason in find_job_refusals(as_policy) if "vision" in reason]
