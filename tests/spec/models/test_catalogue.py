"""The catalogue: published totals, caches and active parameters worked elsewhere, and how a model is named."""

import json
from pathlib import Path

import pytest
import torch

from rlplan.errors import SpecError
from rlplan.memory.serving.kv import kv_elements_per_token, list_layer_caches
from rlplan.spec.files.job_file import job_from
from rlplan.spec.model import Component, ModelSpec
from rlplan.spec.models.catalogue import find_model, load_catalogue, resolve_model
from tests.factories import make_model, write_config
from tests.spec.models.test_families import ALIASES

CATALOGUE = load_catalogue()


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_model_has_its_published_number_of_parameters(name: str) -> None:
    model = find_model(name)
    assert model.num_parameters == CATALOGUE[name].num_parameters
    assert model.num_parameters == sum(tensor.numel for tensor in model.tensors)
    assert model.num_active_parameters <= model.num_parameters
    assert CATALOGUE[name].source


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("Qwen/Qwen3-30B-A3B", 3_353_032_704),
        ("Qwen/Qwen3-235B-A22B", 22_190_763_520),
        ("mistralai/Mixtral-8x7B-v0.1", 12_879_925_248),
        ("deepseek-ai/DeepSeek-V3", 37_552_297_472),
        ("moonshotai/Kimi-K2-Thinking", 32_861_500_928),
        ("MiniMaxAI/MiniMax-M2.5", 11_030_553_088),
        ("moonshotai/Kimi-K2.5", 32_861_500_928 + 471_143_920),  # and the vision tower with its projector
    ],
)
def test_one_token_passes_the_parameters_that_the_research_notes_worked_out(name: str, active: int) -> None:
    assert find_model(name).num_active_parameters == active


@pytest.mark.parametrize(
    ("name", "bf16_bytes"),
    [
        ("meta-llama/Llama-2-7b-hf", 524_288),
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("Qwen/Qwen2.5-7B", 57_344),
        ("Qwen/Qwen3-32B", 262_144),
        ("facebook/opt-13b", 819_200),
        ("deepseek-ai/DeepSeek-V3", 70_272),
        ("moonshotai/Kimi-K2-Thinking", 70_272),
        ("openai/gpt-oss-20b", 49_152),
        ("google/gemma-3-4b-it", 139_264),
        ("MiniMaxAI/MiniMax-M2.5", 253_952),
        ("Qwen/Qwen3.5-27B", 16 * 2 * 4 * 256 * 2),
    ],
)
def test_a_token_caches_what_the_research_notes_worked_out(name: str, bf16_bytes: int) -> None:
    assert 2 * sum(kv_elements_per_token(find_model(name)).values()) == bf16_bytes


def test_windows_and_states_are_those_of_the_models() -> None:
    oss = list_layer_caches(find_model("openai/gpt-oss-20b"))
    assert [(cache.kind, cache.window) for cache in oss[:2]] == [("sliding", 128), ("full", None)]
    gemma = list_layer_caches(find_model("google/gemma-3-27b-it"))
    assert [cache.kind for cache in gemma].count("full") == 10  # 62 layers, each sixth
    assert gemma[0].window == 1024
    qwen = list_layer_caches(find_model("Qwen/Qwen3.5-27B"), tp=2)
    assert [cache.kind for cache in qwen[:4]] == ["linear", "linear", "linear", "full"]
    # 48 value heads of 128 by 128, 3 past inputs of 2*16*128 + 48*128 channels; over two ranks.
    assert (qwen[0].recurrent_elements, qwen[0].conv_elements) == (48 * 128 * 128 // 2, 3 * 10_240 // 2)
    scout = list_layer_caches(find_model("meta-llama/Llama-4-Scout-17B-16E-Instruct"))
    assert [cache.window for cache in scout[:4]] == [8192, 8192, 8192, None]
    assert list_layer_caches(find_model("deepseek-ai/DeepSeek-V3.2"))[0].index_elements_per_token == 128
    assert {cache.window for cache in list_layer_caches(find_model("mistralai/Mistral-7B-v0.1"))} == {4096}


def test_components_add_up_and_are_where_they_belong() -> None:
    model = find_model("deepseek-ai/DeepSeek-V3")
    assert model.numel_by_component[Component.ROUTER] == 58 * (256 * 7168 + 256)
    assert model.numel_by_component[Component.EXPERTS] == 58 * 256 * 3 * 7168 * 2048
    assert model.numel_by_component[Component.HEAD] == 129_280 * 7168
    assert (
        find_model("Qwen/Qwen2.5-VL-7B-Instruct").numel_by_component[Component.VISION] == 8_292_166_656 - 7_615_616_512
    )
    assert Component.HEAD not in find_model("Qwen/Qwen2.5-0.5B").numel_by_component


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen/qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-7B-Instrct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/a/folder/that/lies/deep/qwen/qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("/a/folder/that/lies/deep/Qwen/Qwen2.5-7B-Instrct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/models/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
    ],
)
def test_an_id_is_exact_and_a_near_one_is_told(name: str, near: str) -> None:
    with pytest.raises(SpecError, match=f"Did you mean '{near}'") as caught:
        resolve_model(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", "x" * 100_000, "\0", "../" * 5000, "no/such", "~nobody/x"])
def test_a_name_that_is_nothing_is_one_message(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 600


def test_a_path_goes_before_an_id(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    assert resolve_model(str(folder)) == resolve_model(str(folder / "config.json")) == make_model()


def test_a_model_travels_as_json() -> None:
    for name in ("Qwen/Qwen3.5-35B-A3B", "deepseek-ai/DeepSeek-V3.2", "google/gemma-4-26B-A4B"):
        model = find_model(name)
        assert ModelSpec.model_validate_json(model.model_dump_json()) == model


LIVE = [name for name, entry in CATALOGUE.items() if entry.like is None]


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIVE)
def test_a_bundled_config_gives_the_tensors_of_the_live_module(name: str) -> None:
    import transformers

    config = CATALOGUE[name].config
    architecture = config["architectures"][0]
    kind = getattr(transformers, ALIASES.get(architecture, architecture))
    with torch.device("meta"):
        module = kind(kind.config_class(**config))
    expected = sorted((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    assert sorted((parameter.name, parameter.shape) for parameter in find_model(name).parameters) == expected


def test_a_sequence_classifier_has_the_shape_of_its_family_s_language_model_where_it_may_be_one(tmp_path: Path) -> None:
    config = json.loads(json.dumps(CATALOGUE["meta-llama/Llama-3.1-8B"].config))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    assert resolve_model(str(tmp_path), may_classify=True) == find_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(SpecError, match="LlamaForSequenceClassification"):
        resolve_model(str(tmp_path))


def test_a_model_is_fetched_for_the_key_that_names_it() -> None:
    asked: dict[str, str] = {}

    def fetch(name: str, folder: Path, key: str) -> str:
        asked[key] = name
        return name

    job_from(
        {"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100", "algorithm": "ppo"},
        ["roles.reward.path=org/reward", "roles.value.path=org/value"],
        fetch=fetch,
    )
    assert asked == {
        "policy": "Qwen/Qwen2.5-7B",
        "roles.reward.path": "org/reward",
        "roles.value.path": "org/value",
    }
