"""Layouts: what rows of other people's data sets look like, told by their columns, and what they mean here.

In: rows as dictionaries. Out: rows of ours. Known: our own; verl's (`prompt` a chat, `reward_model.ground_truth`);
TRL's (`prompt` a text or a chat; `completion`, with `label` where it was judged; `messages`, the last of which is the
answer; preferences as `chosen` and `rejected`, with the prompt in both where there is none beside them); OpenRLHF's
(`input`, `label`); and columns that the job names.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rlplan.emit.vllm import MAX_IMAGES
from rlplan.printable import printable as shown
from rlplan.spec.declaration import Given

Cells = Mapping[str, Any]
Chat = list[dict[str, str]]


MAX_WHY = 200
"""Characters of what is wrong with a row."""
PROMPTS = ("question", "problem", "instruction", "query", "input_text", "text", "content")
"""What other data sets call their prompts; a job has to say so."""
ANSWERS = ("answer", "label", "solution", "ground_truth")
OF_IMAGES = ("image", "images", "video", "videos")
"""Columns, and kinds of a message's parts, that verl, TRL and OpenRLHF hold images in."""
MAX_NAMED = 10
"""Columns that a message names."""


def printable(text: str, limit: int = MAX_WHY) -> str:
    """A text for a message, whatever a file holds: at most `limit` characters, those for terminals escaped."""
    escaped = shown(text[: limit + 1], kept="").replace("\n", "\\n")
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


class BadRowError(ValueError):
    """A row that cannot be used; the text says why, short and printable."""

    def __init__(self, why: str) -> None:
        super().__init__(printable(why))


@dataclass(frozen=True, slots=True)
class NoText:
    """A cell that JSON does not know.

    Fit for a column beside, and for no prompt and no answer.
    """

    value: Any
    """The cell with texts in place of dates and such, and null in place of bytes."""

    why: str
    """What JSON does not know of it."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names that the job gives; None: as the layout has them."""

    prompt: str | None = None
    answer: str | None = None
    image: str | None = None
    """None: a row with an image is a bad row."""


@dataclass(frozen=True, slots=True)
class DataRow:
    id: str
    """The row's own, or its number."""

    prompt: str | Chat
    """A text, or a chat that a template makes one of."""

    answer: str | None = None
    """The right answer, or the tests of a program; None where the row has none."""

    chosen: str | Chat | None = None
    rejected: str | Chat | None = None
    others: str = "{}"
    """The other columns as a JSON object."""

    chat: Chat | None = None
    """What the policy's template has made `prompt` of; None where it is a text of the file's own."""

    joined: Chat | None = None
    """The chat whose contents are `prompt`, line by line, where the policy has no template."""

    images: tuple[Any, ...] = ()
    """What its image column holds, one an image."""

    number: int = field(default=0, compare=False)
    """Where it stands in its file, from 1."""


def likely_prompt(cells: Cells) -> str:
    """The column that is likely to be the prompt: one of a usual name, else the longest text; empty without one.

    >>> likely_prompt({"answer": "a long text of a solution", "question": "How many?"}), likely_prompt({"n": 1})
    ('question', '')
    """
    named = {name: value for name, value in cells.items() if len(name) <= MAX_WHY}  # one that can be typed
    texts = {name: value for name, value in named.items() if isinstance(value, str) and name not in ANSWERS}
    usual = [name for name in PROMPTS if name in texts]
    return usual[0] if usual else max(texts, key=lambda name: len(texts[name]), default="")


def detect(names: set[str], columns: Columns) -> str:
    """The layout of a table by its columns. Raises: BadRowError when it has none that is known."""
    if columns.prompt or columns.answer:
        return "columns"
    if {"id", "prompt", "answer"} == names or {"id", "prompt", "chosen", "rejected"} == names:
        return "rlplan"
    if {"prompt", "reward_model"} <= names:
        return "verl"
    if {"chosen", "rejected"} <= names or "messages" in names:
        return "trl"
    if "prompt" in names:
        return "trl"
    if "input" in names:
        return "openrlhf"
    some = ", ".join(printable(name, 20) for name in sorted(names)[:MAX_NAMED]) or "none"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    raise BadRowError(f"no column holds a prompt: there are {some}{more}")


def read_row(layout: str, number: int, cells: Cells, columns: Columns, *, given: Given = "") -> DataRow:
    """The row as one of ours. number: from 1, its id where it has none. given: the answers that it must hold.

    Raises: BadRowError.
    """
    prompt_name = columns.prompt or ("input" if layout == "openrlhf" else "prompt")
    images = image_cells(_bare(cells.get(columns.image))) if columns.image else []
    cells = {name: cell for name, cell in cells.items() if name != columns.image}
    _refuse_images(cells, prompt_name)
    used = {prompt_name, "id"}
    chosen = rejected = None
    if columns.prompt and columns.prompt not in cells:
        raise BadRowError(f"there is no column '{columns.prompt}'")
    prompt = cells.get(prompt_name)
    if prompt is None and "messages" in cells:
        prompt, cells = _split_messages(cells)
    answer, answer_name = _answer(layout, cells, columns)
    if given == "pair" or (given == "unpaired" and "chosen" in cells):
        prompt, chosen, rejected = _pair(cells, prompt)
        used |= {"chosen", "rejected"}
    elif given == "answer":
        prompt, chosen = _imitated(cells, prompt, answer)
        used |= {"completion", "chosen", "rejected"}
    elif given:
        said, is_good = _said(cells, "completion"), _bare(cells.get("label"))
        if not isinstance(is_good, bool):
            raise BadRowError("label is not true or false: whether its completion is good")
        chosen, rejected = (said, None) if is_good else (None, said)
        used |= {"completion", "label"}
    used |= {"answer"} & {answer_name}  # under another name it goes to functions that ask for that
    name = _bare(cells.get("id", _extra(cells).get("index")))
    return DataRow(
        id=f"row-{number}" if name is None or name == "" else str(name),
        prompt=_text_or_chat(prompt, prompt_name),
        answer=answer,
        chosen=chosen,
        rejected=rejected,
        others=json.dumps({key: _bare(value) for key, value in cells.items() if key not in used}),
        images=tuple(images),
        number=number,
    )


def image_cells(cell: Any) -> list[Any]:
    """What stands for each image of a row. Raises: BadRowError."""
    found = cell if isinstance(cell, list) else [] if _is_null(cell) else [cell]
    if len(found) > MAX_IMAGES:
        raise BadRowError(f"{len(found)} images, at most {MAX_IMAGES} a prompt")
    return found


def _refuse_images(cells: Cells, prompt_name: str) -> None:
    """A prompt without its image is another question."""
    for name in OF_IMAGES:
        if name != prompt_name and not _is_null(value := _bare(cells.get(name))) and value not in ("", []):
            raise BadRowError(
                f"column '{name}' is for images, and prompts here are texts: data.image_column={name} where the policy "
                "takes images, else remove the row, or the column where its text asks everything"
            )


def _has_image(content: Any) -> bool:
    """Whether a message's content is a list of parts and one of them is not text: `{"type": "image_url", ...}`."""
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and str(part.get("type", "")).startswith(OF_IMAGES) for part in parts)


def _answer(layout: str, cells: Cells, columns: Columns) -> tuple[str | None, str | None]:
    """(the right answer, the column that had it)."""
    if columns.answer is not None:
        if columns.answer not in cells:
            raise BadRowError(f"there is no column '{columns.answer}'")
        return _plain(cells[columns.answer]), columns.answer
    if layout == "verl":
        model = cells.get("reward_model")
        _check_text(model, "reward_model")
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise BadRowError("reward_model has no ground_truth")
        return _plain(model["ground_truth"]), None
    for name in ANSWERS:
        if not _is_null(cells.get(name)):
            return _plain(cells[name]), name
    return None, None


def _split_messages(cells: Cells) -> tuple[Chat, Cells]:
    """(the prompt, the cells with a completion): all but the last message, and what the assistant says in it."""
    chat = _text_or_chat(cells["messages"], "messages")
    if isinstance(chat, str) or len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise BadRowError("messages must end with one of the assistant's, after at least one other")
    rest = {name: cell for name, cell in cells.items() if name != "messages"}
    return chat[:-1], rest | {"completion": chat[-1]["content"]}


def _imitated(cells: Cells, prompt: Any, answer: str | None) -> tuple[Any, str | Chat]:
    """(the prompt, what is imitated). A `chosen` that is told with its prompt is read as a pair's."""
    name = next((name for name in ("completion", "chosen") if name in cells), None)
    is_pair = name == "chosen" and "rejected" in cells
    if is_pair and (prompt is None or (isinstance(cells["chosen"], list) and len(cells["chosen"]) > 1)):
        return _pair(cells, prompt)[:2]
    said = answer if name is None else _said(cells, name)
    if not said:
        raise BadRowError("it has no answer (completion, messages, chosen, answer, label, solution, ground_truth)")
    return prompt, said


def _said(cells: Cells, name: str) -> str:
    """An answer: a text, or one message of the assistant's."""
    said = _text_or_chat(cells.get(name), name)
    if isinstance(said, str):
        return said
    if len(said) != 1 or said[0]["role"] != "assistant":
        raise BadRowError(f"{name} must be one message of the assistant's")
    return said[0]["content"]


def _pair(cells: Cells, prompt: Any) -> tuple[Any, str | Chat, str | Chat]:
    chosen, rejected = (_text_or_chat(cells.get(name), name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise BadRowError("chosen is a chat and rejected a text, or the other way round")
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_chats(prompt, chosen, rejected)
    elif prompt is None:
        prompt, chosen, rejected = _split_texts(str(chosen), str(rejected))
    if str(chosen).strip() == str(rejected).strip():
        raise BadRowError("chosen and rejected are the same, spaces around them aside")
    return prompt, chosen, rejected


def _split_chats(prompt: Any, chosen: Chat, rejected: Chat) -> tuple[Any, str, str]:
    """Both chats without what they begin with in common: the prompt, where there is none of its own, or one that is a
    text and says what their last common message says (UltraFeedback).
    """
    shared = _num_shared(chosen, rejected)
    if prompt is None or (isinstance(prompt, str) and shared and chosen[shared - 1]["content"] == prompt):
        prompt = chosen[:shared]
    elif shared and chosen[:shared] != prompt:
        raise BadRowError("chosen and rejected begin with another prompt than the row's")
    ends = chosen[shared:], rejected[shared:]
    if not prompt or any(len(end) != 1 or end[0]["role"] != "assistant" for end in ends):
        raise BadRowError("chosen and rejected must differ in one last message of the assistant's")
    return prompt, ends[0][0]["content"], ends[1][0]["content"]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Texts that hold the prompt too, as hh-rlhf has them: up to the last `Assistant:` that they have in common."""
    mark = "Assistant:"
    at = chosen.rfind(mark, 0, _num_shared(chosen, rejected))
    if at < 0:
        raise BadRowError("there is no prompt, and chosen and rejected have none in common that ends with `Assistant:`")
    at += len(mark)
    return chosen[:at], chosen[at:], rejected[at:]


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many parts two begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _text_or_chat(value: Any, name: str) -> str | Chat:
    _check_text(value, name)
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"{name} is empty")
        return _encodable(value, name)
    if value is None:
        raise BadRowError(f"{name} is null")
    if isinstance(value, list) and value:
        for message in value:
            if isinstance(message, Mapping) and _has_image(message.get("content")):
                raise BadRowError(f"{name}: a message holds an image, and prompts here are texts: remove the row")
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise BadRowError(f"{name}: a message is an object with the texts role and content")
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise BadRowError(f"{name} is {type(value).__name__}, not a text or a chat")


def _extra(cells: Cells) -> Cells:
    extra = _bare(cells.get("extra_info"))
    return extra if isinstance(extra, Mapping) else {}


def _is_null(value: Any) -> bool:
    """None, or the NaN that tables of numbers have in its place."""
    return value is None or value != value


def _bare(cell: Any) -> Any:
    return cell.value if isinstance(cell, NoText) else cell


def _check_text(value: Any, name: str) -> None:
    if isinstance(value, NoText):
        raise BadRowError(f"{name} holds {value.why}: write it as text")


def _plain(value: Any) -> str:
    _check_text(value, "the answer")
    if _is_null(value):
        raise BadRowError("the answer is null")
    text = value if isinstance(value, str) else json.dumps(value)
    return _encodable(text, "answer")


def _encodable(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(f"{name} holds half a character (a lone surrogate)") from None
    return text
