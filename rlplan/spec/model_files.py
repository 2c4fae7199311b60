"""Files of a model's folder beside its weights: which belong to the tokenizer, and which chat templates it has.

In: a Hugging Face folder. Out: names of files, and templates by name as transformers' `AutoTokenizer` reads them.
Left out: reading a tokenizer, and rendering chats (runtime/data/model_text.py).

Each class of tokenizers names its own vocabulary files, and there are dozens. So what is copied is chosen by kinds of
files: all texts and vocabularies count, except those that describe the weights. What a model is told by is a list of
names instead, for notes and logs that lie beside a model make no other model of it. The tests compare both rules with
every name in the installed transformers.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import read_json, shorten

CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of the templates that have names of their own, such as `tool_use.jinja`."""
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
PROCESSOR_TEMPLATE = "chat_template.json"
"""The template of an older processor, which transformers 5 still reads."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names that transformers chooses by: the second one where a chat comes with tools."""
MAX_TEMPLATE_BYTES = 1 << 24
"""Largest chat template or tokenizer configuration that is read."""

KINDS = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.tokenizer", "*.codes", "*.bpe",
)  # fmt: skip
"""Texts and vocabularies in the folder itself."""
IDENTIFYING = (
    "config.json", "generation_config.json", CHAT_TEMPLATE, PROCESSOR_TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS,
    "added_tokens.json", "tokenizer.json", "tokenizer.*.json", "tokenizer.model", "tokenizer.model.v*", "tekken.json",
    "tiktoken.model", "*.tiktoken", "normalizer.json", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json",
    "entity_vocab.json", "merges.txt", "prophetnet.tokenizer", "sentencepiece.bpe.model", "sentencepiece.model",
    "source.spm", "spiece.model", "spm.model", "spm_char.model", "target.spm", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "vocab.json", "vocab.txt", "word_pronunciation.json", "word_shape.json",
)  # fmt: skip
"""Files that say what a model is, beside its weights: configs, chat templates, and tokenizers by the names that
transformers and mistral-common read."""
OF_THE_WEIGHTS = (
    "config.json", "*.index.json", "adapter_config.json", "hf_quant_config.json", "quantize_config.json",
    "quant_config.json", "params.json", "trainer_state.json", "requirements*.txt", "license*.txt", "readme*.txt",
)  # fmt: skip
"""Files of these kinds that would be wrong beside other weights: an engine that finds `hf_quant_config.json` takes the
weights for quantised ones, and transformers loads another base where it finds `adapter_config.json`."""
OF_THE_PROCESSOR = ("*processor_config.json", "audio_tokenizer_config.json")
"""What turns images, videos or sounds into a model's inputs."""


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Files that a copy of the model needs beside its weights and config, relative to the folder; no processor's.

    They are the tokenizer's, with its chat templates, and the settings of generation.
    """
    return tuple(path for path in _files(folder) if not _matches(path.name, OF_THE_PROCESSOR))


def processor_files(folder: Path) -> tuple[Path, ...]:
    """Files that turn images, videos or sounds into inputs, relative to the folder."""
    return tuple(path for path in _files(folder) if _matches(path.name, OF_THE_PROCESSOR))


def identifying_files(folder: Path) -> list[Path]:
    """Files that a model is told by, beside its weights, relative to the folder; a closed list of names."""
    return sorted([path for path in _beside(folder) if _matches(path.name, IDENTIFYING)] + _more_templates(folder))


def _files(folder: Path) -> list[Path]:
    copied = [
        path for path in _beside(folder) if _matches(path.name, KINDS) and not _matches(path.name, OF_THE_WEIGHTS)
    ]
    return sorted(copied + _more_templates(folder))


def _beside(folder: Path) -> list[Path]:
    return [Path(path.name) for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _more_templates(folder: Path) -> list[Path]:
    return [Path(MORE_TEMPLATES, path.name) for path in (folder / MORE_TEMPLATES).glob("*.jinja") if path.is_file()]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in patterns)


def chat_template(folder: Path, *, has_tools: bool = False) -> str | None:
    """The template that renders chats, or None where the model has none. Raises: SpecError when it cannot be read.

    Source: transformers 5.19, `PreTrainedTokenizerBase.get_chat_template`.
    """
    templates = chat_templates(folder)
    return templates.get(WITH_TOOLS if has_tools and WITH_TOOLS in templates else DEFAULT)


def chat_templates(folder: Path) -> dict[str, str]:
    """All templates by name. Files come before `tokenizer_config.json`, as in transformers. Raises: SpecError."""
    files = {DEFAULT: folder / CHAT_TEMPLATE}
    files |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    templates = {
        name: read_text(path, "the policy's chat template", limit=MAX_TEMPLATE_BYTES)
        for name, path in files.items()
        if path.exists()
    }
    return templates or _stored(tokenizer_config(folder)) or _stored(_object(folder / PROCESSOR_TEMPLATE))


def _stored(config: dict[str, Any]) -> dict[str, str]:
    """Templates in a configuration: one text, or a list of names with texts."""
    stored = config.get("chat_template")
    if isinstance(stored, str):
        return {DEFAULT: stored}
    if isinstance(stored, dict):
        return {str(name): text for name, text in stored.items() if isinstance(text, str)}
    named = [entry for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    return {str(entry.get("name")): entry["template"] for entry in named if isinstance(entry.get("template"), str)}


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special tokens that only `special_tokens_map.json` names. Raises: SpecError."""
    return _object(folder / SPECIAL_TOKENS) | _object(folder / TOKENIZER_CONFIG)


def _object(path: Path) -> dict[str, Any]:
    data = read_json(path, "the tokenizer's configuration", limit=MAX_TEMPLATE_BYTES) if path.exists() else {}
    if not isinstance(data, dict):
        raise SpecError(
            f"the tokenizer's configuration is {shorten(data)}",
            where=str(path),
            rule="a JSON object",
            way_out="copy the model's tokenizer there again",
        )
    return data


def check_templates_are_kept(folder: Path, base: Path, where: str) -> None:
    """Refuses a model without a chat template that the model it was trained from has. Raises: SpecError.

    Training would go on without an error on texts that the model does not know: chats line by line.
    where: the key of the job that names the folder.
    """
    kept, templates = chat_templates(folder), chat_templates(base)
    lost = sorted(templates.keys() - kept.keys())
    if lost:
        files = [str(path) for path in _files(base) if path.suffix == ".jinja"] or [
            name for name in (TOKENIZER_CONFIG, PROCESSOR_TEMPLATE) if (base / name).is_file()
        ]
        sources = sorted({str(base / Path(name).parts[0]) for name in files})
        raise SpecError(
            f"the model has lost {len(lost)} of the {len(templates)} chat templates of the model that it was trained "
            f"from: {', '.join(lost)}",
            where=f"{where}: {folder}, trained from {base}",
            rule="a trained model has every chat template of its base, so that chats are written as before",
            way_out=f"cp -r {' '.join(sources)} {folder}",
        )
