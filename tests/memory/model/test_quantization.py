"""Quantised weights: bytes by hand for each format, what a checkpoint leaves alone, and published sizes."""

import pytest

from rlplan.errors import SpecError
from rlplan.memory.model import quantization as q
from rlplan.memory.model.quantization import (
    Quantization,
    convert_quantization_spec,
    find_quantization_by_name,
    parse_quantization,
    weight_bytes,
)
from rlplan.memory.serving.weights import build_engine_layout, engine_weight_bytes
from rlplan.spec.model import Parameter
from rlplan.spec.models.catalogue import find_model
from rlplan.spec.models.config import Config, QuantizationSpec, read_quantization
from rlplan.units import GIB

NUMEL = 4096 * 4096
FORMATS = {form.name: form for form in vars(q).values() if isinstance(form, q.WeightFormat)}


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("fp8", NUMEL + 8),
        ("fp8-channel", NUMEL + 4096 * 4),
        ("fp8-block", NUMEL + 32 * 32 * 4),
        ("int8", NUMEL + 4096 * 4),
        ("nf4", NUMEL // 2 + NUMEL // 64 * 4),
        ("nf4-dq", NUMEL // 2 + NUMEL // 64 + NUMEL // 64 // 256 * 4 + 4),
        ("awq", NUMEL // 2 + NUMEL // 128 * 2 + NUMEL // 256),
        ("gptq", NUMEL // 2 + NUMEL // 128 * 2 + NUMEL // 256 + 4096 * 4),
        ("gptq-8", NUMEL + NUMEL // 128 * 2 + NUMEL // 128 + 4096 * 4),
        ("int4-g32", NUMEL // 2 + NUMEL // 32 * 2),
        ("mxfp4", NUMEL // 2 + NUMEL // 32),
        ("nvfp4", NUMEL // 2 + NUMEL // 16 + 8),
    ],
)
def test_each_format_has_the_bytes_that_its_layout_says(name: str, num_bytes: int) -> None:
    assert FORMATS[name].num_bytes((4096, 4096)) == num_bytes
    assert FORMATS[name].num_bytes((3, 4096, 4096)) == 3 * num_bytes, "stacked experts"


def test_double_quantisation_takes_what_the_paper_says() -> None:
    assert q.NF4_DOUBLE.num_bytes((4096, 4096)) * 8 / NUMEL == pytest.approx(4.127, abs=0.001)


def test_embeddings_norms_heads_and_routers_stay_as_they_are() -> None:
    model = find_model("Qwen/Qwen3-30B-A3B")
    scheme = Quantization(q.FP8_BLOCK)
    plain = {tensor.name.rpartition(".layers.0.")[2] for tensor in model.tensors if not scheme.covers(tensor)}
    assert {"model.embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "input_layernorm.weight"} <= plain
    assert not any("experts" in name or "q_proj" in name for name in plain)


def test_modules_that_a_config_leaves_out_are_left_alone() -> None:
    spec = QuantizationSpec(
        method="fp8", strategy="block", left_out=("lm_head", "re:.*self_attn.*", "model.layers.1.mlp")
    )
    scheme = convert_quantization_spec(spec, where="here")
    covered = [
        scheme.covers(Parameter(f"model.layers.{name}.weight", (128, 128)))
        for name in ("0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj", "11.mlp.up_proj")
    ]
    assert covered == [False, True, False, True]


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, q.FP8_BLOCK),
        ({"quant_method": "fp8", "activation_scheme": "static"}, q.FP8_TENSOR),
        ({"quant_method": "fbgemm_fp8"}, q.FP8_CHANNEL),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, q.AWQ),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, q.GPTQ_8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, q.INT8_CHANNEL),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, q.NF4_DOUBLE),
        ({"quant_method": "mxfp4"}, q.MXFP4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
            },
            q.FP8_CHANNEL,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}}
                },
            },
            q.INT4_GROUP_32,
        ),
    ],
)
def test_a_config_says_its_format(config: dict[str, object], form: q.WeightFormat) -> None:
    spec = read_quantization(Config({"quantization_config": config}, where="config.json"))
    assert spec is not None
    assert convert_quantization_spec(spec, where="config.json").form == form


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "something"},
        {},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 10**30}}}},
    ],
)
def test_a_method_that_is_not_counted_is_refused_never_guessed(config: dict[str, object]) -> None:
    spec = read_quantization(Config({"quantization_config": config}, where="config.json"))
    assert spec is not None
    with pytest.raises(SpecError, match="not counted"):
        convert_quantization_spec(spec, where="config.json")


@pytest.mark.parametrize("value", [7, "fp8", [1], {"quant_method": 7}, {"quant_method": "fp8", "ignore": [1]}])
def test_a_quantisation_config_of_the_wrong_shape_is_refused(value: object) -> None:
    with pytest.raises(SpecError):
        read_quantization(Config({"quantization_config": value}, where="config.json"))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8-block"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "fp8-channel"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"),
        ("TheBloke/Mistral-7B-v0.1-AWQ", "awq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq"),
        ("openai/gpt-oss-20b", "mxfp4"),
        ("deepseek-ai/DeepSeek-V3", "fp8-block"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("Qwen/Qwen3-32B", None),
    ],
)
def test_published_names_say_how_their_weights_are_stored(name: str, form: str | None) -> None:
    scheme = find_quantization_by_name(name)
    assert (scheme.form.name if scheme else None) == form


def test_unknown_words_are_refused_and_plain_ones_mean_none() -> None:
    assert parse_quantization("bf16", where="here") is None
    with pytest.raises(SpecError, match="unknown"):
        parse_quantization("fp3", where="here")


@pytest.mark.parametrize(("name", "gib"), [("openai/gpt-oss-20b", 12.8), ("openai/gpt-oss-120b", 60.8)])
def test_checkpoints_have_the_size_that_their_model_card_says(name: str, gib: float) -> None:
    """Source: gpt-oss model card, arXiv 2508.10925, table 1, `Checkpoint Size`."""
    size_gib = weight_bytes(find_model(name).tensors, 2, find_quantization_by_name(name)) / GIB
    assert size_gib == pytest.approx(gib, abs=0.06)


def test_mxfp4_experts_are_padded_to_what_the_kernels_take() -> None:
    """24 layers of 32 experts: 2,880 becomes 3,072 for the hidden size and 2,944 for the expert's width."""
    model, scheme = find_model("openai/gpt-oss-20b"), find_quantization_by_name("openai/gpt-oss-20b")
    as_stored = weight_bytes(model.tensors, 2, scheme)
    padding = 24 * 32 * 3 * (3072 * 2944 - 2880 * 2880) * 17 // 32  # 4.25 bits a weight
    biases = 24 * 32 * 2 * ((3072 - 2880) + 2 * (2944 - 2880))
    assert engine_weight_bytes(model, build_engine_layout(), 2, scheme) == as_stored + padding + biases
