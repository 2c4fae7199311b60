"""From what stands in the form to an answer: budget, timeline, verdict, the job file and the command.

In: fields as text. Out: JSON-able answers. Left out: HTTP (server.py), how it looks (rlplan/report).
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
"""Keys of a job by the form's field; an empty field is left to rlplan."""
MORE = "more"
"""The field of further overrides, as they stand on a command line."""
NAMED = ("model", "algorithm", "gpus")
"""Fields that are options of a command."""


@dataclass(frozen=True)
class Asked:
    """What stands in the form."""

    named: Mapping[str, str]
    """Model, algorithm and GPUs."""
    overrides: tuple[str, ...]
    """`KEY=VALUE` each."""

    @staticmethod
    def of(fields: Mapping[str, str]) -> "Asked":
        """From the form. Raises: SpecError for a field that it does not have, or words that are no overrides."""
        if unknown := set(fields) - {*FIELDS, MORE}:
            raise SpecError(
                f"there is no field '{min(unknown)}'",
                where="the form",
                rule=f"one of {', '.join((*FIELDS, MORE))}",
                way_out="load the page again",
            )
        filled = {name: text.strip() for name, text in fields.items() if text.strip()}
        try:
            more = shlex.split(filled.pop(MORE, ""))
        except ValueError as error:
            raise SpecError(
                f"the further keys cannot be read: {error}",
                where="the form: further keys",
                rule="KEY=VALUE as on a command line, quotes in pairs",
                way_out="rollout.tp=2 training.zero_stage=3",
            ) from None
        if filled.get("algorithm") in given_answers():
            filled.pop("num_samples", None)
        overrides = [f"{key}={filled[name]}" for name, key in FIELDS.items() if name in filled and name not in NAMED]
        return Asked({name: filled[name] for name in NAMED if name in filled}, (*overrides, *more))

    @property
    def command(self) -> str:
        """The same as it is typed."""
        options = [word for name, value in self.named.items() for word in (f"--{name}", value)]
        return shlex.join(["rlplan", "plan", *options, *self.overrides, "-o", "plan.json"])

    @property
    def job(self) -> str:
        """The same as a job file."""
        from ruamel.yaml import YAML

        from rlplan.spec.files.yaml import apply_overrides
        from rlplan.spec.job import JobSpec

        short: dict[str, Any] = {"schema_version": 2, **{FIELDS[name]: value for name, value in self.named.items()}}
        long, opened = JobSpec.long_form(short), {word.partition(".")[0].strip() for word in self.overrides}
        yaml, out = YAML(), io.StringIO()
        yaml.dump(apply_overrides({key: (long if key in opened else short)[key] for key in short}, self.overrides), out)
        return out.getvalue()


def given_answers() -> list[str]:
    """Algorithms that are given their answers: how many samples a prompt has is not asked of them."""
    from rlplan.spec.algorithms import ALGORITHMS

    return [name for name, declared in ALGORITHMS.items() if declared.given]


def answer(fields: Mapping[str, str]) -> dict[str, Any]:
    """`html` to show and `job`, `command` to copy; where something is wrong, only what is wrong, as `html`."""
    from rlplan.report import html

    try:
        asked = Asked.of(fields)
        return {"html": _told(asked), "job": asked.job, "command": asked.command}
    except RlplanError as error:
        return {"html": html.render("refusal.html.j2", error=error), "job": "", "command": ""}


def _told(asked: Asked) -> str:
    """The page of the best plan, without the next best ones, which take a search each."""
    from rlplan.planner.search import best_plan
    from rlplan.report import html
    from rlplan.report.plans.forecast import forecast
    from rlplan.report.plans.plan_page import plan_page
    from rlplan.report.plans.write import draw
    from rlplan.sources import JobWords, read_question

    words = JobWords(overrides=[*asked.overrides], **asked.named)
    plan = best_plan(read_question("plan", words).job, with_others=False)
    return html.render("plan_parts.html.j2", page=plan_page(plan), drawing=draw(forecast(plan, "the form")))
