"""Files in a model's folder other than weights: tokenizer files, chat templates, processor files.

In: a Hugging Face folder. Out: names of files, and templates by name as transformers' `AutoTokenizer` reads them. Left
out: loading a tokenizer, and rendering chats (runtime/data/model_text.py).

Each tokenizer class names its own vocabulary files, and there are dozens. So files to copy are chosen by pattern: all
texts and vocabularies, except those that describe the weights. Files that identify a model are a closed list instead,
since notes and logs in a model's folder do not make it another model. The tests compare both rules with every name in
the installed transformers.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.reading import read_text
from rlplan.spec.base import read_json, shorten_value

CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of named templates, such as `tool_use.jinja`."""
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
PROCESSOR_TEMPLATE = "chat_template.json"
"""Template file of an older processor, which transformers 5 still reads."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Template names that transformers chooses by; the second is for chats with tools."""
MAX_TEMPLATE_BYTES = 1 << 24
"""Size limit of a chat template or tokenizer configuration."""

KINDS = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.tokenizer", "*.codes", "*.bpe",
)  # fmt: skip
"""Patterns of texts and vocabularies in the folder itself."""
IDENTIFYING = (
    "config.json", "generation_config.json", CHAT_TEMPLATE, PROCESSOR_TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS,
    "added_tokens.json", "tokenizer.json", "tokenizer.*.json", "tokenizer.model", "tokenizer.model.v*", "tekken.json",
    "tiktoken.model", "*.tiktoken", "normalizer.json", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json",
    "entity_vocab.json", "merges.txt", "prophetnet.tokenizer", "sentencepiece.bpe.model", "sentencepiece.model",
    "source.spm", "spiece.model", "spm.model", "spm_char.model", "target.spm", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "vocab.json", "vocab.txt", "word_pronunciation.json", "word_shape.json",
)  # fmt: skip
"""Files that identify a model besides its weights: configs, chat templates, and tokenizers by the names that
transformers and mistral-common read."""
OF_THE_WEIGHTS = (
    "config.json", "*.index.json", "adapter_config.json", "hf_quant_config.json", "quantize_config.json",
    "quant_config.json", "params.json", "trainer_state.json", "requirements*.txt", "license*.txt", "readme*.txt",
)  # fmt: skip
"""Files matching KINDS that would be wrong next to other weights. An engine that finds `hf_quant_config.json` assumes
quantized weights; transformers loads another base if it finds `adapter_config.json`."""
OF_THE_PROCESSOR = ("*processor_config.json", "audio_tokenizer_config.json")
"""Files that configure how images, videos or sounds become a model's inputs."""


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Files other than weights and config that a copy of a text model needs, relative to the folder.

    They are the tokenizer's, with its chat templates, and the settings of generation.
    """
    return tuple(path for path in _files_to_copy(folder) if not _matches(path.name, OF_THE_PROCESSOR))


def processor_files(folder: Path) -> tuple[Path, ...]:
    """Files that configure how images, videos or sounds become inputs, relative to the folder."""
    return tuple(path for path in _files_to_copy(folder) if _matches(path.name, OF_THE_PROCESSOR))


def identifying_files(folder: Path) -> list[Path]:
    """Files that identify a model besides its weights, relative to the folder."""
    return sorted([path for path in _list_files(folder) if _matches(path.name, IDENTIFYING)] + _more_templates(folder))


def _files_to_copy(folder: Path) -> list[Path]:
    copied = [
        path for path in _list_files(folder) if _matches(path.name, KINDS) and not _matches(path.name, OF_THE_WEIGHTS)
    ]
    return sorted(copied + _more_templates(folder))


def _list_files(folder: Path) -> list[Path]:
    return [Path(path.name) for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _more_templates(folder: Path) -> list[Path]:
    return [Path(MORE_TEMPLATES, path.name) for path in (folder / MORE_TEMPLATES).glob("*.jinja") if path.is_file()]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in patterns)


def chat_template(folder: Path, *, has_tools: bool = False) -> str | None:
    """The template that renders chats; None if the model has none. Raises: SpecError when it cannot be read.

    Source: transformers 5.19, `PreTrainedTokenizerBase.get_chat_template`.
    """
    templates = chat_templates(folder)
    return templates.get(WITH_TOOLS if has_tools and WITH_TOOLS in templates else DEFAULT)


def chat_templates(folder: Path) -> dict[str, str]:
    """All templates by name. Files take precedence over `tokenizer_config.json`, as in transformers. Raises:
    SpecError.
    """
    files = {DEFAULT: folder / CHAT_TEMPLATE}
    files |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    templates = {
        name: read_text(path, "the policy's chat template", limit=MAX_TEMPLATE_BYTES)
        for name, path in files.items()
        if path.exists()
    }
    return (
        templates
        or _embedded_templates(tokenizer_config(folder))
        or _embedded_templates(_read_object(folder / PROCESSOR_TEMPLATE))
    )


def _embedded_templates(config: dict[str, Any]) -> dict[str, str]:
    """Templates inside a configuration: one text, or a list of names with texts."""
    stored = config.get("chat_template")
    if isinstance(stored, str):
        return {DEFAULT: stored}
    if isinstance(stored, dict):
        return {str(name): text for name, text in stored.items() if isinstance(text, str)}
    named = [entry for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    return {str(entry.get("name")): entry["template"] for entry in named if isinstance(entry.get("template"), str)}


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special tokens that only `special_tokens_map.json` has. Raises: SpecError."""
    return _read_object(folder / SPECIAL_TOKENS) | _read_object(folder / TOKENIZER_CONFIG)


def _read_object(path: Path) -> dict[str, Any]:
    data = read_json(path, "the tokenizer's configuration", limit=MAX_TEMPLATE_BYTES) if path.exists() else {}
    if not isinstance(data, dict):
        raise SpecError(
            f"the tokenizer's configuration is {shorten_value(data)}",
            where=str(path),
            rule="a JSON object",
            way_out="copy the model's tokenizer there again",
        )
    return data


def check_templates_are_kept(folder: Path, base: Path, where: str) -> None:
    """Raises: SpecError where a model lacks a chat template of the model it was trained from.

    Without it, training would silently continue on text of another format. where: the key of the job that names the
    folder.
    """
    remaining, templates = chat_templates(folder), chat_templates(base)
    lost = sorted(templates.keys() - remaining.keys())
    if lost:
        files = [str(path) for path in _files_to_copy(base) if path.suffix == ".jinja"] or [
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
