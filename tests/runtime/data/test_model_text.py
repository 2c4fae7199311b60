"""A stranger's tokenizer and chat template: what they do, they do in a process with limits, and end in a message."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplan.errors import SpecError
from rlplan.runtime.data import model_text
from rlplan.runtime.data.layouts import Columns
from rlplan.runtime.data.loading import RowNeeds, load_rows
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.data.role_tokenizers import check_role_tokenizers
from rlplan.runtime.data.text_tokens import TextTokenizer, read_end_tokens
from tests.factories import EXAMPLES, make_job
from tests.repository.at_night import mark_nightly

SORTER = EXAMPLES / "models" / "sorter"
CHAT = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "x"}}]


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The sorter, its tokenizer changed."""
    shutil.copytree(SORTER, folder, dirs_exist_ok=True)
    data = json.loads((SORTER / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def test_it_says_what_the_tokenizer_itself_says() -> None:
    words = TextTokenizer(SORTER)
    with ModelText(SORTER) as model:
        for text in ("Sort: 3 1 2", "", "1" * 5000):
            assert list(model.tokens(text)) == words.tokens(text, adds_special_tokens=True)
            assert list(model.tokens(text, adds_special_tokens=False)) == words.tokens(text)
        assert model.longest_token > 0


FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "an id that is none": lambda data: data["model"]["vocab"].update({"x": -1}),
    "an id far away": lambda data: data["model"]["vocab"].update({"x": 4_294_967_295}),
    "a pattern that is none": lambda data: data.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    ),
    "an unknown model": lambda data: data["model"].update(type="Nothing"),
    "a merge of nothing": lambda data: data["model"].update(type="BPE", merges=[["a", "zz"]]),
    "an empty decoder": lambda data: data.update(decoder={"type": "Sequence", "decoders": [{}]}),
    "no unknown token": lambda data: data["model"].update(type="Unigram", vocab=[], unk_id=7),
    "padding to the moon": lambda data: data.update(
        padding={"strategy": {"Fixed": 1 << 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}
    ),
    "a text that grows": lambda data: data.update(
        normalizer={"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 1000} for _ in range(4)
        ]}
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mark_nightly(FAULTS, but=("an id far away", "an unknown model"))
)  # the next test has "a text that grows"
def test_a_hostile_tokenizer_is_one_message_or_works(tmp_path: Path, name: str) -> None:
    folder = change_tokenizer(tmp_path / "model", FAULTS[name])
    before = psutil.Process().memory_info().rss
    refused = None
    try:
        with ModelText(folder) as model:
            assert len(model.tokens("Sort: 1 2")) < 1000
    except SpecError as error:
        refused = error
    if refused is not None:
        assert "the tokenizer cannot be read" in refused.what
        assert refused.where == str(folder / "tokenizer.json")
    assert psutil.Process().memory_info().rss < before + (64 << 20)


def test_a_tokenizer_that_takes_gigabytes_is_stopped_and_a_run_does_not_begin(tmp_path: Path) -> None:
    folder = change_tokenizer(tmp_path / "model", FAULTS["a text that grows"])
    with pytest.raises(SpecError, match="the tokenizer cannot be read"):
        load_prompts(make_job(**{"policy.path": str(folder)}))


TEMPLATES = {
    "memory": "{% set x = namespace(a='x' * 1000) %}{% for i in range(40) %}{% set x.a = x.a + x.a %}{% endfor %}",
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "an attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "its own message": "{{ raise_exception('\x1b[2J no') }}",
    "a long answer": "{{ 'x' * 2000000 }}",
}


@pytest.mark.parametrize("name", mark_nightly(TEMPLATES, but=("time", "a long answer")))
def test_a_hostile_template_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(model_text, "ANSWER_S", 1.0)
    monkeypatch.setattr(model_text, "MAX_ANSWER_BYTES", 1 << 20)
    shutil.copytree(SORTER, folder := tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    (rows := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, CHAT)))
    before = psutil.Process().memory_info().rss
    with pytest.raises(SpecError, match="the policy's chat template cannot render the prompts") as caught:
        load_rows(rows, Columns(), folder, RowNeeds())
    assert str(caught.value).replace("\n", "").isprintable()
    assert psutil.Process().memory_info().rss < before + (64 << 20)
    assert not [child for child in psutil.Process().children() if "model_text" in " ".join(child.cmdline())]


@pytest.mark.parametrize("text", ['{"eos_token_id": "2"}', '{"eos_token_id": [1, null]}', '{"eos_token_id": -1}',
                                  "[", "5", '{"eos_token_id": 1e9}', '{"eos_token_id": {"a": 1}}', "\x00"])  # fmt: skip
def test_a_hostile_generation_config_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(SpecError, match=r"generation_config\.json|eos_token_id"):
        read_end_tokens(tmp_path)


def test_a_reward_model_s_tokenizer_is_tried_before_the_driver_reads_it(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
        data["pre_tokenizer"] = {"type": "Nothing"}

    folder = change_tokenizer(tmp_path / "reward", change)
    with pytest.raises(SpecError, match="the tokenizer cannot be read"):
        check_role_tokenizers(make_job(**{"roles.reward.path": str(folder)}))
