"""Loading: a table in any known layout becomes DataRows, or one message that lists its bad rows.

In: a path, the names of columns, the policy's folder for its chat template. Out: rows with rendered prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import (
    BadRowError,
    Chat,
    Columns,
    DataRow,
    detect_layout,
    guess_prompt_column,
    read_row,
)
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.tables import read_table
from rlplan.runtime.images.in_rows import split_into_parts
from rlplan.spec.base import shorten_value
from rlplan.spec.declaration import Given
from rlplan.spec.model_files import chat_template, tokenizer_config

MAX_CAUSES, MAX_ROW_NUMBERS = 10, 3
"""Most causes that a message lists, and most rows that it names for each."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows of a table, and how they were read."""

    rows: tuple[DataRow, ...]
    layout: str
    """Detected layout, such as `verl` or `trl`."""

    template: str
    """How prompts were rendered, in words."""

    def summarize(self, path: Path) -> str:
        return f"{path.name}: {len(self.rows)} rows in the layout of {self.layout}, prompts are {self.template}"


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """Requirements of a job's algorithm and rewards on every row."""

    answer_kind: Given = ""
    """Kind of answers to learn from."""

    answers: bool = False
    """Whether every row needs a right answer."""

    check: Callable[[str], None] = lambda _: None
    """A function that raises BadRowError for an unusable answer."""

    rule: str = ""
    """The rule that `check` enforces, for messages."""


@dataclass(frozen=True, slots=True)
class Chats:
    """System prompt and tools. With either of them every prompt becomes a chat; otherwise a text stays a text."""

    system: str | None = None
    """System message for chats that have none."""

    tools: tuple[Any, ...] = ()
    """Schemas of the tools that the policy may call."""

    def apply(self, prompt: str | Chat) -> str | Chat:
        if self.system is None and not self.tools:
            return prompt
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        has_system = self.system is None or chat[0]["role"] == "system"
        return chat if has_system else [{"role": "system", "content": str(self.system)}, *chat]


def load_rows(path: Path, columns: Columns, model_folder: Path, needs: RowNeeds, chats: Chats = Chats()) -> Loaded:
    """The rows of a table. Raises: SpecError that lists bad rows; HostError when a package is missing."""
    rows: list[DataRow] = []
    faults: list[tuple[int, str]] = []
    first_with: dict[str, int] = {}
    layout, near = "", ""
    for number, cells in read_table(path, columns.image):
        try:
            if isinstance(cells, str):
                raise BadRowError(cells)
            near = near or guess_prompt_column(cells)
            # The first readable row decides; later rows of a JSON file that lack its columns are bad rows.
            layout = layout or detect_layout(set(cells), columns)
            row = read_row(layout, number, cells, columns, answer_kind=needs.answer_kind)
            _check_answer(row, needs)
            if row.images and not isinstance(row.prompt, str):
                split_into_parts(row.prompt, len(row.images))  # checks the number of marks; rendering splits again
            if row.id in first_with and "id" not in cells:  # verl's index counts within one source
                row = replace(row, id=f"{row.id}-row-{number}")
            if row.id in first_with:
                raise BadRowError(f"id {shorten_value(row.id)} is also the id of row {first_with[row.id]}")
            first_with[row.id] = number
            rows.append(row)
        except BadRowError as error:
            faults.append((number, str(error)))
    if faults:
        raise report_bad_rows(
            path,
            faults,
            len(rows),
            rule="rows in the layout of rlplan, TRL, verl or OpenRLHF, or columns named by data.prompt_column and "
            "data.answer_column" + (needs.rule and f"; {needs.rule}"),
            way_out="fix or remove those rows" if layout or not near else f"data.prompt_column={near}",
        )
    if not rows:
        raise SpecError(
            "the prompt file is empty",
            where=str(path),
            rule="at least one row",
            way_out="add rows, or name another file",
        )
    return _render_prompts([replace(row, prompt=chats.apply(row.prompt)) for row in rows], layout, model_folder, chats)


def _check_answer(row: DataRow, needs: RowNeeds) -> None:
    if needs.answers and row.answer is None:
        raise BadRowError("no answer (answer, label, solution or ground_truth)")
    if needs.answers and not str(row.answer).strip():
        raise BadRowError("the answer is empty, so an empty response would be right")
    needs.check(row.answer or "")


def report_bad_rows(
    path: Path, faults: Sequence[tuple[int, str]], num_good: int, *, rule: str, way_out: str
) -> SpecError:
    """One error about all bad rows of a file. faults: (row number from 1, text of the BadRowError)."""
    by_cause: dict[str, list[int]] = {}
    for number, why in faults:
        by_cause.setdefault(why, []).append(number)
    first, later = [*by_cause.items()][:MAX_CAUSES], [*by_cause.values()][MAX_CAUSES:]
    causes = "; ".join(f"{_format_numbers(numbers)}: {why}" for why, numbers in first)
    causes += f"; and {sum(map(len, later))} more" if later else ""
    return SpecError(
        f"{len(faults)} of {len(faults) + num_good} rows cannot be used: {causes}",
        where=str(path),
        rule=rule,
        way_out=way_out,
    )


def _format_numbers(rows: Sequence[int]) -> str:
    """Row numbers in words.

    >>> _format_numbers([4]), _format_numbers(range(2, 202))
    ('row 4', 'rows 2, 3, 4 and 197 more')
    """
    more = f" and {len(rows) - MAX_ROW_NUMBERS} more" if len(rows) > MAX_ROW_NUMBERS else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MAX_ROW_NUMBERS]))}{more}"


def _render_prompts(rows: list[DataRow], layout: str, model_folder: Path, style: Chats) -> Loaded:
    """Render chats as texts: with the policy's template, or by joining their contents if it has none."""
    chats = [row.prompt for row in rows if not isinstance(row.prompt, str)]
    if not chats:
        return Loaded(tuple(rows), layout, "text")
    template = chat_template(model_folder, has_tools=bool(style.tools))
    if template is None and style != Chats():
        raise make_template_error(model_folder)
    if template:
        chats = [
            split_into_parts(row.prompt, len(row.images)) if row.images else row.prompt
            for row in rows
            if not isinstance(row.prompt, str)
        ]
    texts = iter(_render_chats(chats, model_folder, style.tools) if template else [_join_chat(chat) for chat in chats])
    rendered_rows = []
    for row in rows:
        if isinstance(row.prompt, str):
            rendered_rows.append(row)
        elif template:
            rendered_rows.append(replace(row, prompt=next(texts), chat=row.prompt))
        else:
            rendered_rows.append(replace(row, prompt=next(texts), joined=row.prompt))
    how = "chats by the policy's template" if template else "chats, joined: the policy has no template"
    return Loaded(tuple(rendered_rows), layout, how)


def _join_chat(chat: Any) -> str:
    return "\n".join(message["content"] for message in chat)


def make_template_error(model_folder: Path) -> SpecError:
    """The error for a job that needs a chat template which the policy lacks."""
    return SpecError(
        "the policy has no chat template, which data.system_prompt and tools need",
        where=str(model_folder),
        rule="a chat model has chat_template.jinja, or chat_template in tokenizer_config.json",
        way_out="add the model's template, or use a policy that has one",
    )


def open_chats(model_folder: Path, *, has_tools: bool = False) -> ModelText:
    """Start the process that renders chats with the policy's template. Raises: SpecError."""
    template = chat_template(model_folder, has_tools=has_tools)
    if template is None:
        raise make_template_error(model_folder)
    return ModelText(model_folder, template, tokenizer_config(model_folder))


def _render_chats(chats: Sequence[Any], model_folder: Path, tools: Sequence[Any]) -> list[str]:
    with open_chats(model_folder, has_tools=bool(tools)) as model:
        return model.render(chats, tools)
