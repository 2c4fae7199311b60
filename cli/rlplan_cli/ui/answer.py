"""Answers for the form of `rlplan ui`: verdict, memory, timeline, the job file and the command.

In: fields as text. Out: answers as JSON values. Left out: HTTP (server.py), the page's look (rlplan/report).
"""

import io
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlplan.errors import RlplanError, SpecError

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
MORE = "more"
"""The field for further overrides, written as on a command line."""
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

        short: dict[str, Any] = {"schema_version": 2, **{FIELDS[name]: value for name, value in self.named.items()}}
        long, opened = JobSpec.expand_short_forms(short), {word.partition(".")[0].strip() for word in self.overrides}
        yaml, out = YAML(), io.StringIO()
        yaml.dump(apply_overrides({key: (long if key in opened else short)[key] for key in short}, self.overrides), out)
        return out.getvalue()


def given_answers() -> list[str]:
    """Algorithms that train on the data set's answers, for which the number of samples per prompt has no meaning."""
    from rlplan.spec.algorithms import ALGORITHMS

    return [name for name, declared in ALGORITHMS.items() if declared.given]


def answer(fields: Mapping[str, str]) -> dict[str, Any]:
    """Answer with `html` to show, and `job` and `command` to copy; on an error, with the error as `html`."""
    from rlplan.report import html

    try:
        asked = Asked.parse(fields)
        return {"html": _render_plan(asked), "job": asked.job, "command": asked.command}
    except RlplanError as error:
        return {"html": html.render("refusal.html.j2", error=error), "job": "", "command": ""}


def _render_plan(asked: Asked) -> str:
    """Render the best plan, without the next best ones, each of which would take a search."""
    from rlplan.planner.search import find_best_plan
    from rlplan.report import html
    from rlplan.report.plans.forecast import forecast
    from rlplan.report.plans.plan_page import plan_page
    from rlplan.report.plans.write import draw
    from rlplan.sources import JobWords, read_question

    words = JobWords(overrides=[*asked.overrides], **asked.named)
    plan = find_best_plan(read_question("plan", words).job, with_others=False)
    return html.render("plan_parts.html.j2", page=plan_page(plan), drawing=draw(forecast(plan, "the form")))
