"""Files beside a model's weights, and its chat templates: as transformers names and reads them."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.spec.model_files import (
    chat_template,
    check_templates_are_kept,
    processor_files,
    tokenizer_config,
    tokenizer_files,
)
from tests.factories import EXAMPLES

SORTER = EXAMPLES / "models" / "sorter"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
TOOLS = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + PLAIN
CHAT = [{"role": "user", "content": "12"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def names_in_transformers() -> set[str]:
    """Files that a tokenizer's class or the loaders of transformers name, by their source."""
    import transformers

    root, names = Path(transformers.__file__).parent, set[str]()
    for path in (
        *root.glob("models/*/tokenization*.py"),
        *root.glob("tokenization*.py"),
        root / "convert_slow_tokenizer.py",
    ):
        for block in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", path.read_text("utf-8"), re.DOTALL):
            names |= set(re.findall(r':\s*"([^"]+)"', block))
    constants = ("tokenization_utils_base.py", "utils/hub.py", "utils/__init__.py", "utils/peft_utils.py")
    for path in (root / constant for constant in constants):
        names |= set(re.findall(r'^\w*(?:_FILE|_NAME) = "([\w.]+\.\w+)"', path.read_text("utf-8"), re.MULTILINE))
    return names


def test_every_file_that_transformers_names_is_copied_but_weights_and_what_describes_them(tmp_path: Path) -> None:
    names = names_in_transformers()
    assert len(names) > 30, names
    for name in names:
        (tmp_path / name).touch()
    copied = {path.name for path in (*tokenizer_files(tmp_path), *processor_files(tmp_path))}
    assert {name for name in names - copied if not name.endswith((".safetensors", ".bin", ".h5", ".msgpack"))} == {
        "config.json",
        "adapter_config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
    }


def test_what_describes_other_weights_or_is_code_or_prose_is_not_copied(tmp_path: Path) -> None:
    for name in ("hf_quant_config.json", "quantize_config.json", "trainer_state.json", "modeling_x.py", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").touch()
    assert tokenizer_files(tmp_path) == ()


def test_the_language_part_of_a_model_has_no_processor(tmp_path: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "vocab.json"):
        (tmp_path / name).touch()
    assert tokenizer_files(tmp_path) == (Path("vocab.json"),)
    assert len(processor_files(tmp_path)) == 3


def as_files(folder: Path, config: dict[str, Any]) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    config["chat_template"] = "what a file goes before"


def as_one_file(folder: Path, config: dict[str, Any]) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)


def as_one_text(folder: Path, config: dict[str, Any]) -> None:
    config["chat_template"] = PLAIN


def as_a_list(folder: Path, config: dict[str, Any]) -> None:
    config["chat_template"] = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]


LAYOUTS = [as_files, as_one_file, as_one_text, as_a_list]
Layout = Callable[[Path, dict[str, Any]], None]


def write_tokenizer(folder: Path, layout: Layout | None) -> Path:
    """The sorter's tokenizer with a chat template, as one of the layouts that transformers reads stores it."""
    folder.mkdir(parents=True)
    shutil.copyfile(SORTER / "tokenizer.json", folder / "tokenizer.json")
    config = json.loads((SORTER / "tokenizer_config.json").read_text())
    if layout is not None:
        layout(folder, config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_template_is_the_one_that_transformers_takes_with_and_without_tools(tmp_path: Path, layout: Layout) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path / "model", layout)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert chat_template(folder) == theirs.get_chat_template()
    assert chat_template(folder, has_tools=True) == theirs.get_chat_template(tools=[TOOL])


def test_a_special_token_that_only_the_map_of_special_tokens_names_is_known(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", as_one_text)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    config = tokenizer_config(folder)
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "<eos>")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_template_is_refused_and_the_way_out_brings_it_back(tmp_path: Path, layout: Layout) -> None:
    base = write_tokenizer(tmp_path / "base", layout)
    trained = write_tokenizer(tmp_path / "run" / "policy", None)
    with pytest.raises(SpecError) as caught:
        check_templates_are_kept(trained, base, "policy.path")
    error = caught.value
    assert "default" in error.what
    assert str(trained) in error.where
    subprocess.run(shlex.split(error.way_out), check=True)
    check_templates_are_kept(trained, base, "policy.path")
    assert chat_template(trained, has_tools=True) == chat_template(base, has_tools=True)


def test_a_model_may_have_more_templates_than_its_base_or_another_one(tmp_path: Path) -> None:
    trained, base = (write_tokenizer(tmp_path / name, as_one_text) for name in ("trained", "base"))
    as_files(trained, {})
    check_templates_are_kept(trained, base, "policy.path")
