"""Layouts: the columns of known data set formats, detected from a row and converted to one form.

Supported are columns that the job names, and these layouts:

- rlplan: `id`, `prompt`, `answer`;
- verl: `prompt` as a chat, `reward_model.ground_truth`;
- TRL: `prompt` as a text or chat; `completion`, optionally with a `label`; `messages`, ending with the answer; or
  preferences as `chosen` and `rejected`, which both contain the prompt if there is no `prompt` column;
- OpenRLHF: `input`, `label`.

In: rows as dictionaries. Out: DataRows.
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
"""Most characters of a message about a bad row."""
PROMPTS = ("question", "problem", "instruction", "query", "input_text", "text", "content")
"""Prompt columns of other data sets, suggested to the user; a job must name its column."""
ANSWERS = ("answer", "label", "solution", "ground_truth")
IMAGE_COLUMNS = ("image", "images", "video", "videos")
"""Names of image columns, and of image parts in messages, in verl, TRL and OpenRLHF."""
MAX_NAMED = 10
"""Most columns that a message names."""


def make_printable(text: str, limit: int = MAX_WHY) -> str:
    """A safe text for a message: at most `limit` characters, with control characters escaped."""
    escaped = shown(text[: limit + 1], kept="").replace("\n", "\\n")
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


class BadRowError(ValueError):
    """A row cannot be used; the text gives the reason, short and printable."""

    def __init__(self, why: str) -> None:
        super().__init__(make_printable(why))


@dataclass(frozen=True, slots=True)
class NoText:
    """A cell with values that JSON cannot represent. It may be an extra column, but not a prompt or an answer."""

    value: Any
    """The cell with bytes as null, and with other values that JSON lacks, such as dates, as texts."""

    why: str
    """Type that JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names from the job; None means the layout's own."""

    prompt: str | None = None
    answer: str | None = None
    image: str | None = None
    """None makes a row with an image a bad row."""


@dataclass(frozen=True, slots=True)
class DataRow:
    id: str
    """The row's id, or `row-NUMBER`."""

    prompt: str | Chat
    """A text, or a chat that is not rendered yet."""

    answer: str | None = None
    """The right answer, or the tests of a program; None without one."""

    chosen: str | Chat | None = None
    rejected: str | Chat | None = None
    others: str = "{}"
    """The other columns as a JSON object."""

    chat: Chat | None = None
    """The chat from which the policy's template rendered `prompt`; None if the file has a text."""

    joined: Chat | None = None
    """The chat whose contents were joined to `prompt` because the policy has no template."""

    images: tuple[Any, ...] = ()
    """Cells of the image column, one per image."""

    number: int = field(default=0, compare=False)
    """Row number in its file, from 1."""


def guess_prompt_column(cells: Cells) -> str:
    """The column that probably holds the prompt: one with a common name, else the longest text; empty without one.

    >>> guess_prompt_column({"answer": "a long text of a solution", "question": "How many?"})
    'question'
    >>> guess_prompt_column({"n": 1})
    ''
    """
    named = {name: value for name, value in cells.items() if len(name) <= MAX_WHY}  # names that fit in a message
    texts = {name: value for name, value in named.items() if isinstance(value, str) and name not in ANSWERS}
    usual = [name for name in PROMPTS if name in texts]
    return usual[0] if usual else max(texts, key=lambda name: len(texts[name]), default="")


def detect_layout(names: set[str], columns: Columns) -> str:
    """The layout of a table, detected from its columns. Raises: BadRowError for an unknown layout."""
    if columns.prompt or columns.answer:
        return "columns"
    # TRL comes after rlplan and verl, whose rows have a `prompt` too
    if {"id", "prompt", "answer"} == names or {"id", "prompt", "chosen", "rejected"} == names:
        return "rlplan"
    if {"prompt", "reward_model"} <= names:
        return "verl"
    if {"chosen", "rejected"} <= names or names & {"messages", "prompt"}:
        return "trl"
    if "input" in names:
        return "openrlhf"
    some = ", ".join(make_printable(name, 20) for name in sorted(names)[:MAX_NAMED]) or "none"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    raise BadRowError(f"no column holds a prompt; the columns are {some}{more}")


def read_row(layout: str, number: int, cells: Cells, columns: Columns, *, answer_kind: Given = "") -> DataRow:
    """Convert a row. number: row number from 1, its id if it has none. answer_kind: answers that it must hold.

    Raises: BadRowError.
    """
    prompt_name = columns.prompt or ("input" if layout == "openrlhf" else "prompt")
    images = read_image_cells(_unwrap(cells.get(columns.image))) if columns.image else []
    cells = {name: cell for name, cell in cells.items() if name != columns.image}
    _refuse_images(cells, prompt_name)
    used = {prompt_name, "id"}
    chosen = rejected = None
    if columns.prompt and columns.prompt not in cells:
        raise BadRowError(f"there is no column '{columns.prompt}'")
    prompt = cells.get(prompt_name)
    if prompt is None and "messages" in cells:  # TRL's conversational format for SFT
        prompt, cells = _split_messages(cells)
    answer, answer_name = _find_answer(layout, cells, columns)
    if answer_kind == "pair" or (answer_kind == "unpaired" and "chosen" in cells):
        prompt, chosen, rejected = _read_pair(cells, prompt)
        used |= {"chosen", "rejected"}
    elif answer_kind == "answer":
        prompt, chosen = _read_target(cells, prompt, answer)
        used |= {"completion", "chosen", "rejected"}
    elif answer_kind:
        completion, is_good = _read_completion(cells, "completion"), _unwrap(cells.get("label"))
        if not isinstance(is_good, bool):
            raise BadRowError("label must be true or false: whether the completion is good")
        chosen, rejected = (completion, None) if is_good else (None, completion)
        used |= {"completion", "label"}
    used |= {"answer"} & {answer_name}  # under another name it stays a column, which reward functions may request
    name = _unwrap(cells.get("id", _read_extra_info(cells).get("index")))  # verl keeps an index in extra_info
    return DataRow(
        id=f"row-{number}" if name is None or name == "" else str(name),
        prompt=_read_text_or_chat(prompt, prompt_name),
        answer=answer,
        chosen=chosen,
        rejected=rejected,
        others=json.dumps({key: _unwrap(value) for key, value in cells.items() if key not in used}),
        images=tuple(images),
        number=number,
    )


def read_image_cells(cell: Any) -> list[Any]:
    """The cells of a row's images. Raises: BadRowError."""
    cells = cell if isinstance(cell, list) else [] if _is_null(cell) else [cell]
    if len(cells) > MAX_IMAGES:
        raise BadRowError(f"{len(cells)} images, at most {MAX_IMAGES} per prompt")
    return cells


def _refuse_images(cells: Cells, prompt_name: str) -> None:
    """Reject images without data.image_column: a prompt without its image is a different question."""
    for name in IMAGE_COLUMNS:
        if name != prompt_name and not _is_null(value := _unwrap(cells.get(name))) and value not in ("", []):
            raise BadRowError(
                f"column '{name}' holds images: set data.image_column={name} if the policy takes images, else remove "
                "the row, or the column if the text is a complete question"
            )


def _has_image(content: Any) -> bool:
    """Whether a message's content is a list of parts with an image or video: `{"type": "image_url", ...}`."""
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and str(part.get("type", "")).startswith(IMAGE_COLUMNS) for part in parts)


def _find_answer(layout: str, cells: Cells, columns: Columns) -> tuple[str | None, str | None]:
    """(the right answer, the column that holds it)."""
    if columns.answer is not None:
        if columns.answer not in cells:
            raise BadRowError(f"there is no column '{columns.answer}'")
        return _read_answer(cells[columns.answer]), columns.answer
    if layout == "verl":
        model = cells.get("reward_model")
        _check_text(model, "reward_model")
        if not isinstance(model, Mapping) or "ground_truth" not in model:
            raise BadRowError("reward_model has no ground_truth")
        return _read_answer(model["ground_truth"]), None
    for name in ANSWERS:
        if not _is_null(cells.get(name)):
            return _read_answer(cells[name]), name
    return None, None


def _split_messages(cells: Cells) -> tuple[Chat, Cells]:
    """(the prompt, the cells with a completion): all messages but the last, and the last one's content."""
    chat = _read_text_or_chat(cells["messages"], "messages")
    if isinstance(chat, str) or len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise BadRowError("messages must end with an assistant message, after at least one other message")
    others = {name: cell for name, cell in cells.items() if name != "messages"}
    return chat[:-1], others | {"completion": chat[-1]["content"]}


def _read_target(cells: Cells, prompt: Any, answer: str | None) -> tuple[Any, str | Chat]:
    """(the prompt, the answer to imitate). A `chosen` that contains the prompt is split as in a pair."""
    name = next((name for name in ("completion", "chosen") if name in cells), None)
    is_pair = name == "chosen" and "rejected" in cells
    if is_pair and (prompt is None or (isinstance(cells["chosen"], list) and len(cells["chosen"]) > 1)):
        return _read_pair(cells, prompt)[:2]
    target = answer if name is None else _read_completion(cells, name)
    if not target:
        raise BadRowError("no answer (completion, messages, chosen, answer, label, solution, ground_truth)")
    return prompt, target


def _read_completion(cells: Cells, name: str) -> str:
    """A completion: a text, or one assistant message."""
    completion = _read_text_or_chat(cells.get(name), name)
    if isinstance(completion, str):
        return completion
    if len(completion) != 1 or completion[0]["role"] != "assistant":
        raise BadRowError(f"{name} must be one assistant message")
    return completion[0]["content"]


def _read_pair(cells: Cells, prompt: Any) -> tuple[Any, str | Chat, str | Chat]:
    chosen, rejected = (_read_text_or_chat(cells.get(name), name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise BadRowError("chosen and rejected must both be chats or both be texts")
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_chats(prompt, chosen, rejected)
    elif prompt is None:
        prompt, chosen, rejected = _split_texts(str(chosen), str(rejected))
    if str(chosen).strip() == str(rejected).strip():
        raise BadRowError("chosen and rejected are the same apart from surrounding spaces")
    return prompt, chosen, rejected


def _split_chats(prompt: Any, chosen: Chat, rejected: Chat) -> tuple[Any, str, str]:
    """(prompt, chosen, rejected): the common beginning of both chats is the prompt if the row has no prompt column.

    A text prompt that repeats the last common message is replaced by the common chat, as UltraFeedback needs it.
    """
    shared = _count_shared(chosen, rejected)
    if prompt is None or (isinstance(prompt, str) and shared and chosen[shared - 1]["content"] == prompt):
        prompt = chosen[:shared]
    elif shared and chosen[:shared] != prompt:
        raise BadRowError("chosen and rejected do not begin with the row's prompt")
    ends = chosen[shared:], rejected[shared:]
    if not prompt or any(len(end) != 1 or end[0]["role"] != "assistant" for end in ends):
        raise BadRowError("chosen and rejected must differ in one final assistant message")
    return prompt, ends[0][0]["content"], ends[1][0]["content"]


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of texts that contain the prompt (hh-rlhf), up to their last common `Assistant:`."""
    mark = "Assistant:"
    at = chosen.rfind(mark, 0, _count_shared(chosen, rejected))
    if at < 0:
        raise BadRowError("no prompt column, and chosen and rejected share no beginning that ends with `Assistant:`")
    at += len(mark)
    return chosen[:at], chosen[at:], rejected[at:]


def _count_shared(first: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of leading elements that two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))


def _read_text_or_chat(value: Any, name: str) -> str | Chat:
    _check_text(value, name)
    if isinstance(value, str):
        if not value.strip():
            raise BadRowError(f"{name} is empty")
        return _check_encodable(value, name)
    if value is None:
        raise BadRowError(f"{name} is null")
    if isinstance(value, list) and value:
        for message in value:
            if isinstance(message, Mapping) and _has_image(message.get("content")):
                raise BadRowError(f"{name}: a message holds an image, which prompts cannot: remove the row")
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise BadRowError(f"{name}: a message must be an object with the texts role and content")
        return [{"role": message["role"], "content": message["content"]} for message in value]
    raise BadRowError(f"{name} is {type(value).__name__}, not a text or a chat")


def _read_extra_info(cells: Cells) -> Cells:
    extra = _unwrap(cells.get("extra_info"))
    return extra if isinstance(extra, Mapping) else {}


def _is_null(value: Any) -> bool:
    """Whether a cell is None, or NaN as in tables of numbers."""
    return value is None or value != value


def _unwrap(cell: Any) -> Any:
    return cell.value if isinstance(cell, NoText) else cell


def _check_text(value: Any, name: str) -> None:
    if isinstance(value, NoText):
        raise BadRowError(f"{name} holds {value.why}: write it as text")


def _read_answer(value: Any) -> str:
    _check_text(value, "the answer")
    if _is_null(value):
        raise BadRowError("the answer is null")
    text = value if isinstance(value, str) else json.dumps(value)
    return _check_encodable(text, "answer")


def _check_encodable(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError(f"{name} holds a lone surrogate, which is not a character") from None
    return text
