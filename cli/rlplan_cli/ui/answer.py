"""Answers for the form of `rlplan ui`: verdict, memory, timeline, the job file and the command.

In: fields as text. Out: answers as JSON values. Left out: HTTP (server.py), the page's look (rlplan/report).
"""

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlplan.errors import RlplanError, SpecError
from rlplan.spec.typed import read_hardware, read_model, read_sentence

if TYPE_CHECKING:
    from rlplan.planner.plan import Plan

FIELDS = {
    "model": "policy",
    "algorithm": "algorithm",
    "gpus": "hardware",
    "max_prompt_len": "workload.max_prompt_len",
    "max_response_len": "workload.max_response_len",
    "num_prompts": "workload.num_prompts_per_step",
    "num_samples": "workload.num_samples_per_prompt",
    "placement": "placement.placement",
    "max_staleness": "placement.max_staleness",
    "zero_stage": "training.zero_stage",
    "tp": "rollout.tp",
}
"""Key of a job for each field of the form; rlplan chooses the values of empty fields."""
MORE, ASK = "more", "ask"
"""The fields for further overrides, written as on a command line, and for a question in words or a script."""
NAMED = ("model", "algorithm", "gpus")
"""Fields that are options of `rlplan plan`."""


@dataclass(frozen=True)
class Asked:
    """The contents of the form."""

    named: Mapping[str, str]
    """Model, algorithm and GPUs."""
    overrides: tuple[str, ...]
    """Overrides, `KEY=VALUE` each."""

    @staticmethod
    def parse(fields: Mapping[str, str]) -> "Asked":
        """Parse the fields. Raises: SpecError for an unknown field, or for further keys that are not overrides."""
        if unknown := set(fields) - {*FIELDS, MORE}:
            raise SpecError(
                f"unknown field '{min(unknown)}'",
                where="the form",
                rule=f"one of {', '.join((*FIELDS, MORE))}",
                way_out="reload the page",
            )
        filled = {name: text.strip() for name, text in fields.items() if text.strip()}
        try:
            more = shlex.split(filled.pop(MORE, ""))
        except ValueError as error:
            raise SpecError(
                f"the further keys cannot be read: {error}",
                where="the form: further keys",
                rule="KEY=VALUE as on a command line, with paired quotes",
                way_out="rollout.tp=2 training.zero_stage=3",
            ) from None
        if filled.get("algorithm") in given_answers():
            filled.pop("num_samples", None)
        overrides = [f"{key}={filled[name]}" for name, key in FIELDS.items() if name in filled and name not in NAMED]
        return Asked({name: filled[name] for name in NAMED if name in filled}, (*overrides, *more))

    @property
    def command(self) -> str:
        """The same job as a command line."""
        options = [word for name, value in self.named.items() for word in (f"--{name}", value)]
        return shlex.join(["rlplan", "plan", *options, *self.overrides, "-o", "plan.json"])

    @property
    def job(self) -> str:
        """The same job as a job file."""
        from ruamel.yaml import YAML

        from rlplan.spec.files.yaml import apply_overrides
        from rlplan.spec.job import JobSpec

        named = dict(self.named)
        for name, read in (("model", read_model), ("gpus", read_hardware)):
            if name in named:
                named[name] = read(named[name], "the form", [])
        short: dict[str, Any] = {"schema_version": 2, **{FIELDS[name]: value for name, value in named.items()}}
        long, opened = JobSpec.expand_short_forms(short), {word.partition(".")[0].strip() for word in self.overrides}
        yaml, out = YAML(), io.StringIO()
        yaml.dump(apply_overrides({key: (long if key in opened else short)[key] for key in short}, self.overrides), out)
        return out.getvalue()


def given_answers() -> list[str]:
    """Algorithms that train on the data set's answers, for which the number of samples per prompt has no meaning."""
    from rlplan.spec.algorithms import ALGORITHMS

    return [name for name, declared in ALGORITHMS.items() if declared.given]


def answer(fields: Mapping[str, str]) -> dict[str, Any]:
    """Answer with `html` to show, and `job` and `command` to copy; on an error, with the error as `html`.

    `fields`: the form after a question in words was read.
    """
    from rlplan.report import html

    text = fields.get(ASK, "").strip()
    try:
        if "\n" in text:
            return {"html": _render_script(text, fields), "job": "", "command": ""}
        filled = fill_fields(fields, text) if text else {name: value for name, value in fields.items() if name != ASK}
        asked = Asked.parse(filled)
        page = _render_plan(asked)
        return {"html": page, "job": asked.job, "command": asked.command} | ({"fields": filled} if text else {})
    except RlplanError as error:
        return {"html": html.render("refusal.html.j2", error=error), "job": "", "command": ""}


def fill_fields(fields: Mapping[str, str], text: str) -> dict[str, str]:
    """Fill the form from words; what they do not name stays. Raises: SpecError."""
    reading = read_sentence(text)
    by_key = {key: name for name, key in FIELDS.items()}
    filled = {name: value for name, value in fields.items() if name != ASK}
    filled |= {by_key[key]: str(value) for key, value in reading.keys.items() if key in by_key}
    more = [f"framework={reading.keys['framework']}"] if "framework" in reading.keys else []
    for word in reading.overrides:
        key, _, value = word.partition("=")
        if key in by_key:
            filled[by_key[key]] = value
        else:
            more.append(word)
    return filled | {MORE: shlex.join(more)}


def _render_script(text: str, fields: Mapping[str, str]) -> str:
    """Render the verdict on a pasted script or document of another framework, on the GPUs of the form."""
    from rlplan.foreign.check import Asked as Question
    from rlplan.foreign.check import check, format_assignments
    from rlplan.foreign.source import read_source
    from rlplan.sources import fetch_model

    is_yaml = re.match(r"\s*(#[^\n]*\n\s*)*[\w.]+:(\s|$)", text) is not None
    is_python = re.search(r"^\s*(import|from)\s+\w+", text, re.MULTILINE) is not None
    with TemporaryDirectory(prefix="rlplan-ui-") as folder:
        path = Path(folder) / ("pasted.yaml" if is_yaml else "pasted.py" if is_python else "pasted.sh")
        path.write_text(text, encoding="utf-8")
        checked = check(read_source(path, None), Question(fields.get("gpus", ""), None, (), fetch_model))
    if checked.plan is None:
        raise checked.refusal or SpecError("the script starts no training", where="the pasted text")
    changes = [f"{format_assignments(change.values)}: {change.plan.verdict.value}" for change in checked.changes]
    return _render(checked.plan, [*checked.imported.notes], ["change " + words for words in changes])


def _render_plan(asked: Asked) -> str:
    """Render the best plan, without the next best ones, each of which would take a search."""
    from rlplan.planner.search import find_best_plan
    from rlplan.sources import JobWords, read_question

    question = read_question("plan", JobWords(overrides=[*asked.overrides], **asked.named))
    return _render(find_best_plan(question.job, with_others=False), question.assumed)


def _render(plan: "Plan", assumed: Sequence[str], changes: Sequence[str] = ()) -> str:
    from rlplan.report import html
    from rlplan.report.plans.forecast import forecast
    from rlplan.report.plans.plan_page import plan_page
    from rlplan.report.plans.write import draw

    drawing = draw(forecast(plan, "the form"))
    return html.render(
        "plan_parts.html.j2", page=plan_page(plan), drawing=drawing, is_live=True, assumed=[*changes, *assumed]
    )
