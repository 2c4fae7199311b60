"""Model configs: shapes worked by hand, and every broken config as one message that names file and key."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.spec.model import FAMILIES, ModelSpec, load_model, model_from_config
from tests.factories import EXAMPLES, config_data, make_model, write_config


def test_a_config_becomes_its_shape(tmp_path: Path) -> None:
    assert load_model(write_config(tmp_path)) == make_model()


def test_the_parameters_of_a_small_model_are_those_worked_by_hand() -> None:
    # h=8, q=4*3=12, v=2*3=6, I=20, V=70: embedding 70*8=560; a layer: q 96, k 48, v 48, o 96, q and k norm 3 each,
    # gate, up and down 160 each, norms 8 each: 96+48+48+96+6+480+16 = 790; two layers 1580; last norm 8.
    model = make_model()
    assert model.num_parameters == 560 + 2 * 790 + 8
    assert (model.q_size, model.kv_size) == (12, 6)
    assert model.parameters[0].shape == (70, 8)
    assert make_model(has_tied_embeddings=False).num_parameters == 560 + 2 * 790 + 8 + 560
    # A bias on q, k and v adds 12+6+6 a layer; on the output projection 8 more.
    assert make_model(has_qkv_bias=True).num_parameters == model.num_parameters + 2 * 24
    assert make_model(has_qkv_bias=True, has_output_bias=True).num_parameters == model.num_parameters + 2 * 32


@pytest.mark.parametrize(("name", "count"), [("sorter", 796_032), ("decoder-160m", 154_163_456)])
def test_the_shipped_models_have_the_parameters_that_are_worked_by_hand(name: str, count: int) -> None:
    # sorter: 64*128 + 4*(128*(128 + 2*64) + 128*128 + 2*32 + 3*128*384 + 2*128) + 128 = 8192 + 4*196928 + 128
    # decoder-160m: 32768*1024 + 10*(1024*(1024 + 2*256) + 1024*1024 + 2*64 + 3*1024*3072 + 2*1024) + 1024
    #             = 33554432 + 10*12060800 + 1024
    assert load_model(EXAMPLES / "models" / name).num_parameters == count


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {"has_qk_norm": False}),
        ({"architectures": ["LlamaForCausalLM"], "head_dim": None}, {"has_qk_norm": False, "head_dim": 2}),
        ({"architectures": ["LlamaForCausalLM"], "head_dim": ...}, {"has_qk_norm": False, "head_dim": 2}),
        (
            {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": ...},
            {"has_qk_norm": False, "num_kv_heads": 4},
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"has_qk_norm": False}),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"has_qk_norm": False, "has_qkv_bias": True}),
        ({"attention_bias": True}, {"has_qkv_bias": True, "has_output_bias": True}),
        ({"tie_word_embeddings": False}, {"has_tied_embeddings": False}),
        ({"tie_word_embeddings": ...}, {"has_tied_embeddings": False}),
        ({"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, {}),
    ],
)
def test_families_differ_as_their_configs_say(overrides: dict[str, Any], fields: dict[str, Any]) -> None:
    name = overrides.get("architectures", ["Qwen3ForCausalLM"])[0]
    expected = make_model(architecture=name, **fields)
    assert model_from_config(config_data(**overrides), where="config.json") == expected


NOBODY = 65534
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
REQUIRED += ("intermediate_size", "vocab_size", "max_position_embeddings")
BROKEN_NUMBERS = {
    "missing": ...,
    "null": None,
    "zero": 0,
    "negative": -8,
    "huge": 10**18,
    "float": 8.0,
    "string": "8",
    "true": True,
    "list": [8],
    "nested": {"value": 8},
}


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", BROKEN_NUMBERS.values(), ids=BROKEN_NUMBERS)
def test_a_broken_number_is_refused_with_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    write_config(tmp_path, **{key: value})
    with pytest.raises(SpecError) as caught:
        load_model(tmp_path)
    assert caught.value.exit_code == 2
    assert caught.value.where == f"{tmp_path / 'config.json'}: {key}"
    assert caught.value.what.startswith((f"{key} is ", f"key '{key}' is "))
    assert caught.value.rule


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        ({"architectures": ...}, "architectures", "architecture None is not known"),
        ({"architectures": None}, "architectures", "architecture None is not known"),
        ({"architectures": []}, "architectures", "architecture None is not known"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures", "architecture None is not known"),
        ({"architectures": [7]}, "architectures", "architecture 7 is not known"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures", "is not known"),
        ({"architectures": ["OPTForCausalLM"], "ffn_dim": 20}, "architectures", "'OPTForCausalLM' can be planned"),
        ({"architectures": ["x" * 500_000]}, "architectures", "is not known"),
        ({"num_attention_heads": 5}, "num_key_value_heads", "num_attention_heads 5 does not divide by"),
        ({"num_key_value_heads": 8}, "num_key_value_heads", "num_attention_heads 4 does not divide by"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "tie_word_embeddings is 'yes'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "tie_word_embeddings is 1"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings", "key 'tie_word_embeddings' is null"),
        ({"attention_bias": "no"}, "attention_bias", "attention_bias is 'no'"),
        ({"attention_bias": None}, "attention_bias", "key 'attention_bias' is null"),
        ({"layer_types": "full_attention"}, "layer_types", "layer_types is 'full_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "quantization_config is {'bits': 4}"),
        ({"hidden_size": "8" * 100_000}, "hidden_size", "hidden_size is '8888"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_a_decoder_that_can_run_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], key: str, word: str
) -> None:
    write_config(tmp_path, **overrides)
    with pytest.raises(SpecError) as caught:
        load_model(tmp_path)
    assert caught.value.where == f"{tmp_path / 'config.json'}: {key}"
    assert word in caught.value.what
    assert len(str(caught.value)) < 600


def test_a_misspelt_architecture_is_told_its_right_name(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["Qwen3ForCasualLM"])
    with pytest.raises(SpecError, match="Did you mean 'Qwen3ForCausalLM'"):
        load_model(tmp_path)


def test_heads_that_do_not_divide_the_hidden_size_need_a_head_dim(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["LlamaForCausalLM"], hidden_size=10, head_dim=...)
    with pytest.raises(SpecError, match="hidden_size 10 does not divide by num_attention_heads 4"):
        load_model(tmp_path)


FILES = {
    "empty": b"",
    "open": b'{"architectures": [',
    "words": b"hidden_size = 8",
    "nan": b'{"architectures": ["Qwen3ForCausalLM"], "hidden_size": NaN}',
    "infinity": b'{"hidden_size": -Infinity}',
    "bom": b"\xef\xbb\xbf{}",
    "utf-16": json.dumps(config_data()).encode("utf-16"),
    "latin-1": b'{"name": "caf\xe9"}',
    "binary": bytes(range(256)),
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "5,000 levels": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "100,000 lists": b"[" * 100_000,
    "list": b"[]",
    "null": b"null",
    "number": b"5",
    "text": b'"Qwen3ForCausalLM"',
    "huge": b" " * (2 << 20) + b"{}",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_model(tmp_path)
    assert caught.value.where.startswith(str(tmp_path / "config.json"))
    assert "config.json" in caught.value.what
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("depth", [300, 900, 990])
def test_nesting_just_below_what_the_parser_takes_is_refused_too(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(SpecError):
        load_model(tmp_path)


def test_a_file_in_place_of_a_folder_is_read_as_a_config(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("x")
    with pytest.raises(SpecError, match=r"config\.json is not JSON") as caught:
        load_model(file)
    assert caught.value.where == str(file)


@pytest.mark.parametrize("place", ["absent", "config.json is a folder", "loop"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "model"
    if place == "config.json is a folder":
        (folder / "config.json").mkdir(parents=True)
    elif place == "loop":
        folder.symlink_to(folder)
    with pytest.raises(SpecError, match=r"the model's config\.json") as caught:
        load_model(folder)
    assert caught.value.where == str(folder / "config.json")


def test_code_that_a_config_names_is_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    code = f"import pathlib; pathlib.Path({str(touched)!r}).touch()\nclass Config: pass\nclass Model: pass\n"
    folder = write_config(
        tmp_path / "model",
        architectures=["HostileForCausalLM"],
        auto_map={"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model"},
        trust_remote_code=True,
    )
    (folder / "hostile.py").write_text(code)
    (folder / "__init__.py").write_text(code)
    with pytest.raises(SpecError, match="'HostileForCausalLM' is not known"):
        load_model(folder)
    write_config(folder, auto_map={"AutoConfig": "hostile.Config"})
    assert load_model(folder) == make_model()
    assert not touched.exists()


def test_a_model_without_layers_or_with_too_many_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="num_hidden_layers is 10001"):
        load_model(write_config(tmp_path, num_hidden_layers=10_001))
    assert load_model(write_config(tmp_path, num_hidden_layers=1)).num_layers == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(sorted(config_data())), json_values, max_size=4), st.sampled_from(sorted(FAMILIES))
)
def test_any_config_is_read_or_refused_and_nothing_else(overrides: dict[str, Any], family: str) -> None:
    config = {"sliding_window": None} | config_data(architectures=[family]) | overrides
    with contextlib.suppress(SpecError):
        model = model_from_config(config, where="config.json")
        assert isinstance(model, ModelSpec)
        assert model.num_heads % model.num_kv_heads == 0


def test_a_config_without_permission_is_refused() -> None:
    """Root reads everything, so that it is somebody else for a moment; and nobody else gets into pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_config(folder)
        load_model(folder)  # loads the code, which somebody else may not read either
        (folder / "config.json").chmod(0)
        user = os.geteuid()
        os.seteuid(NOBODY if user == 0 else user)
        try:
            with pytest.raises(SpecError, match="cannot be read: Permission denied"):
                load_model(folder)
        finally:
            os.seteuid(user)
