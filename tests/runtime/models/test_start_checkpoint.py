"""Models on disk: what is loaded, that a model's folder is data, and what a vision-language model's run begins from."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplan.runtime.models import start_checkpoint
from rlplan.runtime.models.start_checkpoint import (
    load_language_model,
    load_scalar_model,
    merge_into_whole_model,
    save_policy,
    write_language_part,
    write_random_checkpoint,
)
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.spec.model import has_vision_tower, load_model, read_model
from rlplan.spec.models.headers import read_checkpoint, read_header
from tests.factories import EXAMPLES
from tests.repository.at_night import mark_nightly
from tests.runtime.runs.architectures import WITH_TOWERS, make_config, write_with_tower
from tests.runtime.traps import trapped_model

SORTER = EXAMPLES / "models" / "sorter"


@pytest.mark.parametrize("load", [load_language_model, load_scalar_model])
def test_python_in_a_model_s_folder_is_not_imported(tmp_path: Path, load: object) -> None:
    """A folder whose config names classes of its own, as those of models with `trust_remote_code` do."""
    folder = tmp_path / "model"
    sprung = trapped_model(SORTER, folder)
    assert callable(load)
    model = load(str(folder))
    assert type(model).__module__.startswith("transformers.models.qwen3.")
    assert not sprung.exists()


@pytest.mark.parametrize("name", mark_nightly(WITH_TOWERS, but=1))
def test_a_vision_language_model_s_language_part_says_of_a_text_what_the_whole_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Trained and put back, the whole model has the new decoder and its own tower, under its own names."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder, start, policy = tmp_path / "whole", tmp_path / "start", tmp_path / "policy"
    whole, ids = write_with_tower(name, folder), torch.tensor([[3, 9, 27, 17, 51, 25, 11, 33, 35, 41, 59, 2]])
    write_language_part(folder, start)
    part = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(part(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    planned = load_model(folder)
    assert planned == read_model(start)
    assert has_vision_tower(folder)
    assert not has_vision_tower(start)
    assert [(p.name, p.shape) for p in planned.parameters] == [(n, tuple(p.shape)) for n, p in part.named_parameters()]

    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.01)
    (policy / "whole").mkdir(parents=True)  # of an export that was ended
    monkeypatch.setattr(start_checkpoint, "MAX_SHARD_BYTES", 100_000)
    save_policy(part.config, part.named_parameters(), policy, folder)
    assert len([*policy.glob("model-*.safetensors")]) > 1
    merge_into_whole_model(policy, folder)
    again = AutoModelForImageTextToText.from_pretrained(policy, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, part(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    trained = {id(p) for p in (*again.model.language_model.parameters(), *again.lm_head.parameters())}
    before = dict(whole.named_parameters())
    tower = {n: p for n, p in again.named_parameters() if id(p) not in trained}
    assert tower
    assert all(torch.equal(parameter, before[name]) for name, parameter in tower.items())


def test_start_weights_that_are_drawn_for_a_vision_language_model_are_its_decoder_s(tmp_path: Path) -> None:
    folder, start = tmp_path / "whole", tmp_path / "start"
    write_with_tower("Qwen2_5_VLForConditionalGeneration", folder)
    (folder / "model.safetensors").unlink()
    write_random_checkpoint(folder, start, seed=0)
    merge_into_whole_model(start, folder)  # no tower's weights: nothing to put it back into
    assert read_model(start) == load_model(folder)


def test_a_router_s_bias_is_saved_with_the_weights_and_loaded_again(tmp_path: Path) -> None:
    """It is no parameter, so that it was left out: an engine then took what lay in fresh memory."""
    folder, start, policy = tmp_path / "model", tmp_path / "start", tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(make_config("DeepseekV3ForCausalLM")))
    write_random_checkpoint(folder, start, seed=0)
    model = load_language_model(str(start))
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.linspace(-1, 1, 8))
    save_policy(model.config, WeightSource(model), policy, folder)
    again = load_language_model(str(policy)).model.layers[1].mlp.gate
    assert torch.equal(again.e_score_correction_bias, bias)
    assert {tensor.name for tensor in read_checkpoint(policy)} == {tensor.name for tensor in read_checkpoint(start)}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in {tensor.name for tensor in read_checkpoint(start)}


def chat_model(folder: Path) -> Path:
    """The sorter with every kind of file that a tokenizer may have beside it."""
    shutil.copytree(SORTER, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools | length }}{{ messages[0].content }}"
    )
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "hf_quant_config.json"):
        (folder / name).write_text("{}")
    return folder


def save_again(folder: Path, out: Path) -> Any:
    model = load_language_model(str(folder))
    save_policy(model.config, WeightSource(model), out, folder)
    return model


def test_a_saved_policy_writes_chats_as_its_base_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base, policy = chat_model(tmp_path / "base"), tmp_path / "policy"
    save_again(base, policy)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (base, policy))
    chat, tool = [{"role": "user", "content": "312"}], {"type": "function", "function": {"name": "f"}}
    assert after.apply_chat_template(chat, tokenize=False) == "312"
    for tools in (None, [tool]):
        texts = [each.apply_chat_template(chat, tools=tools, tokenize=False) for each in (before, after)]
        assert texts[0] == texts[1]
    beside = {str(path.relative_to(policy)) for path in policy.rglob("*") if path.is_file()}
    assert {"vocab.json", "merges.txt", "added_tokens.json", "spiece.model"} <= beside
    assert "hf_quant_config.json" not in beside, "an engine would take the weights for quantised ones"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_weights_are_readable_by_whom_the_umask_lets_read(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        save_again(SORTER, tmp_path / "policy")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "policy").glob("*.safetensors")} == {
        "model.safetensors": oct(mode)
    }


def test_a_large_model_is_saved_in_parts_that_plain_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    policy = tmp_path / "policy"
    save_again(SORTER, policy)
    limit = 1_000_000
    monkeypatch.setattr(start_checkpoint, "MAX_SHARD_BYTES", limit)
    model = save_again(SORTER, policy)
    files = sorted(policy.glob("*.safetensors*"))
    assert [path.name for path in files[:2]] == [f"model-0000{n}-of-0000{len(files) - 1}.safetensors" for n in (1, 2)]
    assert all(sum(t.num_bytes for t in read_header(path)) <= limit for path in files[:-1])
    again = AutoModelForCausalLM.from_pretrained(policy)
    before = dict(model.named_parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in again.named_parameters())
    monkeypatch.undo()
    save_again(SORTER, policy)
    assert [path.name for path in policy.glob("*.safetensors*")] == ["model.safetensors"], "nothing is left beside it"
