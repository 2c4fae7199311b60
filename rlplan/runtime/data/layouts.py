"""Layouts: what rows of other people's data sets look like, told by their columns, and what they mean here.

In: rows as dictionaries. Out: rows of ours. Known: our own; verl's (`prompt` a chat, `reward_model.ground_truth`);
TRL's (`prompt` a text or a chat; preferences as `chosen` and `rejected`, with the prompt in both where there is none
beside them); OpenRLHF's (`input`, `label`); and columns that the job names.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Cells = Mapping[str, Any]
Chat = list[dict[str, str]]


class BadRowError(ValueError):
    """A row that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names that the job gives; None: as the layout has them."""

    prompt: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row. prompt, chosen, rejected: a text, or a chat that a template makes one of. others: the other columns."""

    id: str
    prompt: str | Chat
    answer: str | None = None
    chosen: str | Chat | None = None
    rejected: str | Chat | None = None
    others: str = "{}"


def detect(names: set[str], columns: Columns) -> str:
    """The layout of a table by its columns. Raises: BadRowError when it has none that is known."""
    if columns.prompt or columns.answer:
        return "columns"
    if {"id", "prompt", "answer"} == names or {"id", "prompt", "chosen", "rejected"} == names:
        return "rlplan"
    if {"prompt", "reward_model"} <= names:
        return "verl"
    if {"chosen", "rejected"} <= names:
        return "trl"
    if "prompt" in names:
        return "trl"
    if "input" in names:
        return "openrlhf"
    raise BadRowError(f"no column holds a prompt: there are {', '.join(sorted(names)) or 'none'}")


def read_row(layout: str, number: int, cells: Cells, columns: Columns, *, wants_pairs: bool) -> DataRow:
    """The row as one of ours. number: from 1, its id where it has none. Raises: BadRowError."""
    prompt_name = columns.prompt or ("input" if layout == "openrlhf" else "prompt")
    used = {prompt_name, "id"}
    chosen = rejected = None
    prompt = cells.get(prompt_name)
    if wants_pairs:
        prompt, chosen, rejected = _pair(cells, prompt)
        used |= {"chosen", "rejected"}
    answer, answer_name = _answer(layout, cells, columns)
    used |= {answer_name} if answer_name else set()
    name = cells.get("id", _extra(cells).get("index"))
    return DataRow(
        id=f"row-{number}" if name is None or name == "" else str(name),
        prompt=_text_or_chat(prompt, prompt_name),
        answer=answer,
        chosen=chosen,
        rejected=rejected,
        others=json.dumps({key: value for key, value in cells.items() if key not in used}, default=str),
    )


def _answer(layout: str, cells: Cells, columns: Columns) -> tuple[str | None, str | None]:
    """(the right answer, the column that had it)."""
    if columns.answer is not None:
        if columns.answer not in cells:
            raise BadRowError(f"there is no column '{columns.answer}'")
        return _plain(cells[columns.answer]), columns.answer
    if layout == "verl":
        model = cells.get("reward_model")
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise BadRowError("reward_model has no ground_truth")
        return _plain(model["ground_truth"]), None
    for name in ("answer", "label", "solution", "ground_truth"):
        if not _is_null(cells.get(name)):
            return _plain(cells[name]), name
    return None, None


def _pair(cells: Cells, prompt: Any) -> tuple[Any, str | Chat, str | Chat]:
    chosen, rejected = (_text_or_chat(cells.get(name), name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise BadRowError("chosen is a chat and rejected a text, or the other way round")
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_chats(prompt, chosen, rejected)
    elif prompt is None:
        prompt, chosen, rejected = _split_texts(str(chosen), str(rejected))
    if chosen == rejected:
        raise BadRowError("chosen and rejected are the same")
    return prompt, chosen, rejected


def _split_chats(prompt: Any, chosen: Chat, rejected: Chat) -> tuple[Any, str, str]:
    """Both chats without what they begin with in common, which is the prompt where there is none of its own."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if prompt is None:
        prompt = chosen[:shared]
    elif shared and chosen[:shared] != prompt:
        raise BadRowError("chosen and rejected begin with another prompt than the row's")
    ends = chosen[shared:], rejected[shared:]
    if not prompt or any(len(end) != 1 or end[0]["role"] != "assistant" for end in ends):
        raise BadRowError("chosen and rejected must differ in one last message of the assistant's")
    return prompt, ends[0][0]["content"], ends[1][0]["content"]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Texts that hold the prompt too, as hh-rlhf has them: up to the last `Assistant:` that they have in common."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    mark = "Assistant:"
    at = chosen.rfind(mark, 0, shared)
    if at < 0:
        raise BadRowError("there is no prompt, and chosen and rejected have none in common that ends with `Assistant:`")
    at += len(mark)
    return chosen[:at], chosen[at:], rejected[at:]


def _text_or_chat(value: Any, name: str) -> str | Chat:
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"{name} is empty")
        return _encodable(value, name)
    if value is None:
        raise BadRowError(f"{name} is null")
    if isinstance(value, list) and value:
        for message in value:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise BadRowError(f"{name}: a message is an object with the texts role and content")
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise BadRowError(f"{name} is {type(value).__name__}, not a text or a chat")


def _extra(cells: Cells) -> Cells:
    extra = cells.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}


def _is_null(value: Any) -> bool:
    """None, or the NaN that tables of numbers have in its place."""
    return value is None or value != value


def _plain(value: Any) -> str:
    if _is_null(value):
        raise BadRowError("the answer is null")
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _encodable(text, "answer")


def _encodable(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(f"{name} holds half a character (a lone surrogate)") from None
    return text
