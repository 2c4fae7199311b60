"""Loading: a table in any known layout becomes rows of ours, or one message that lists its bad rows.

In: a path, the names of columns, the policy's folder for its chat template. Out: rows with texts, and what was seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import BadRowError, Chat, Columns, DataRow, detect, likely_prompt, read_row
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.tables import read_table
from rlplan.runtime.images.in_rows import with_parts
from rlplan.spec.base import shorten
from rlplan.spec.declaration import Given
from rlplan.spec.model_files import chat_template, tokenizer_config

MAX_TOLD, MAX_NUMBERS = 10, 3
"""Causes that a message lists, and rows that it names of each."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows, and what is said aloud about them."""

    rows: tuple[DataRow, ...]
    layout: str
    """Whose columns they have, such as `verl` or `trl`."""

    template: str
    """What prompts were made with: `chat template`, `joined` messages, or `text`."""

    def said(self, path: Path) -> str:
        return f"{path.name}: {len(self.rows)} rows in the layout of {self.layout}, prompts are {self.template}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What rows must hold."""

    given: Given = ""
    """Answers to learn from."""

    answers: bool = False
    check: Callable[[str], None] = lambda _: None
    """Raises BadRowError for an answer that will not do."""

    rule: str = ""
    """What `check` holds an answer to, for people."""


@dataclass(frozen=True, slots=True)
class Chats:
    """What every prompt becomes a chat for; without either, a text stays a text."""

    system: str | None = None
    """The first message of a chat that has no system message."""

    tools: tuple[Any, ...] = ()
    """Schemas of the functions that the policy may call."""

    def of(self, prompt: str | Chat) -> str | Chat:
        if self.system is None and not self.tools:
            return prompt
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        has_system = self.system is None or chat[0]["role"] == "system"
        return chat if has_system else [{"role": "system", "content": str(self.system)}, *chat]


def load_rows(path: Path, columns: Columns, model_folder: Path, wanted: Wanted, chats: Chats = Chats()) -> Loaded:
    """The rows of a table. Raises: SpecError that lists bad rows; HostError when a package is missing."""
    rows: list[DataRow] = []
    faults: list[tuple[int, str]] = []
    first_with: dict[str, int] = {}
    layout, near = "", ""
    for number, cells in read_table(path, columns.image):
        try:
            if isinstance(cells, str):
                raise BadRowError(cells)
            near = near or likely_prompt(cells)
            layout = layout or detect(set(cells), columns)
            row = read_row(layout, number, cells, columns, given=wanted.given)
            _check_answer(row, wanted)
            if row.images and not isinstance(row.prompt, str):
                with_parts(row.prompt, len(row.images))
            if row.id in first_with and "id" not in cells:  # verl's index counts within one source
                row = replace(row, id=f"{row.id}-row-{number}")
            if row.id in first_with:
                raise BadRowError(f"id {shorten(row.id)} is also that of row {first_with[row.id]}")
            first_with[row.id] = number
            rows.append(row)
        except BadRowError as error:
            faults.append((number, str(error)))
    if faults:
        raise report(
            path,
            faults,
            len(rows),
            rule="rows in the layout of rlplan, TRL, verl or OpenRLHF, or columns that data.prompt_column and "
            "data.answer_column name" + (wanted.rule and f"; {wanted.rule}"),
            way_out="mend or remove those rows" if layout or not near else f"data.prompt_column={near}",
        )
    if not rows:
        raise SpecError(
            "the prompt file is empty",
            where=str(path),
            rule="at least one row",
            way_out="add rows, or name another file",
        )
    return _with_texts([replace(row, prompt=chats.of(row.prompt)) for row in rows], layout, model_folder, chats)


def _check_answer(row: DataRow, wanted: Wanted) -> None:
    if wanted.answers and row.answer is None:
        raise BadRowError("it has no answer (answer, label, solution or ground_truth)")
    if wanted.answers and not str(row.answer).strip():
        raise BadRowError("its answer is empty: a response that says nothing would be right")
    wanted.check(row.answer or "")


def report(path: Path, faults: Sequence[tuple[int, str]], num_good: int, *, rule: str, way_out: str) -> SpecError:
    """One message about all bad rows of a file. faults: (number from 1, what a BadRowError says)."""
    by_cause: dict[str, list[int]] = {}
    for number, why in faults:
        by_cause.setdefault(why, []).append(number)
    first, later = [*by_cause.items()][:MAX_TOLD], [*by_cause.values()][MAX_TOLD:]
    told = "; ".join(f"{_numbered(numbers)}: {why}" for why, numbers in first)
    told += f"; and {sum(map(len, later))} more" if later else ""
    return SpecError(
        f"{len(faults)} of {len(faults) + num_good} rows cannot be used: {told}",
        where=str(path),
        rule=rule,
        way_out=way_out,
    )


def _numbered(rows: Sequence[int]) -> str:
    """
    >>> _numbered([4]), _numbered(range(2, 202))
    ('row 4', 'rows 2, 3, 4 and 197 more')
    """
    more = f" and {len(rows) - MAX_NUMBERS} more" if len(rows) > MAX_NUMBERS else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MAX_NUMBERS]))}{more}"


def _with_texts(rows: list[DataRow], layout: str, model_folder: Path, style: Chats) -> Loaded:
    """Chats made texts: by the policy's template, or, where it has none, as their contents one after the other."""
    chats = [row.prompt for row in rows if not isinstance(row.prompt, str)]
    if not chats:
        return Loaded(tuple(rows), layout, "text")
    template = chat_template(model_folder, has_tools=bool(style.tools))
    if template is None and style != Chats():
        raise no_template(model_folder)
    if template:
        chats = [
            with_parts(row.prompt, len(row.images)) if row.images else row.prompt
            for row in rows
            if not isinstance(row.prompt, str)
        ]
    texts = iter(_rendered(chats, model_folder, style.tools) if template else [_joined(chat) for chat in chats])
    made = []
    for row in rows:
        if isinstance(row.prompt, str):
            made.append(row)
        elif template:
            made.append(replace(row, prompt=next(texts), chat=row.prompt))
        else:
            made.append(replace(row, prompt=next(texts), joined=row.prompt))
    how = "chats by the policy's template" if template else "chats, joined: the policy has no template"
    return Loaded(tuple(made), layout, how)


def _joined(chat: Any) -> str:
    return "\n".join(message["content"] for message in chat)


def no_template(model_folder: Path) -> SpecError:
    """What a job that needs chats is told."""
    return SpecError(
        "the policy has no chat template, and data.system_prompt or tools make chats of the prompts",
        where=str(model_folder),
        rule="a model that was trained on chats has chat_template.jinja, or chat_template in tokenizer_config.json",
        way_out="put the model's template there, or take a policy that has one",
    )


def open_chats(model_folder: Path, *, has_tools: bool = False) -> ModelText:
    """The process that renders chats by the policy's template. Raises: SpecError."""
    template = chat_template(model_folder, has_tools=has_tools)
    if template is None:
        raise no_template(model_folder)
    return ModelText(model_folder, template, tokenizer_config(model_folder))


def _rendered(chats: Sequence[Any], model_folder: Path, tools: Sequence[Any]) -> list[str]:
    with open_chats(model_folder, has_tools=bool(tools)) as model:
        return model.rendered(chats, tools)
