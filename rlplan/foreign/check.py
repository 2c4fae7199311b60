"""Check of a foreign configuration: whether it fits as given, and the smallest changes that make it fit.

In: Settings, hardware, overrides of the imported job. Out: Checked: the plan of the job as it stands, and changes in
the source's own keys. Every change was planned before it is named: with it the configuration fits on the GPU and on the
host (`Plan.fits`). Left out: better layouts (`rlplan plan` of the imported job).
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from rlplan.errors import NoFeasiblePlanError, RlplanError, SpecError
from rlplan.foreign.convert import Imported, Taken, convert
from rlplan.foreign.engine_share import add_kv_cache
from rlplan.foreign.pipeline import read_stages
from rlplan.foreign.settings import MAX_SHOWN, Settings, parse_word
from rlplan.foreign.table import ReleasedDefault, Remedy
from rlplan.foreign.vllm.served import LENGTH, serve
from rlplan.frameworks.profile import list_versions
from rlplan.frameworks.rules import matches
from rlplan.planner.answers.plan_results import results_as_json
from rlplan.planner.combinations import Combinations, Effect, Kind, Trial
from rlplan.planner.executable import explain_misfit
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import list_assumptions
from rlplan.planner.serving import Served
from rlplan.spec.files.job_file import Fetch, job_from
from rlplan.spec.files.job_schema import job_keys
from rlplan.spec.job import JobSpec
from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.training import count_ranks
from rlplan.spec.resolved import settle
from rlplan.units import ceil_div

SCHEMA_VERSION = 1
MOST_REMEDIES = 3
OTHERS = "larger GPUs, more of them, or a smaller model"
"""Way out of a refusal where no change of the configuration helps."""
_OVERRIDE = re.compile(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+=(?:\{[^}]*\}|[^\s,;()]+)")
"""An override of a job, such as `training.tp=2`, within a sentence."""
_KEY = re.compile(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+")
MOST_STEPS = 6
"""Steps of one remedy that are planned: each costs a search."""
MOST_TRIALS = 60
"""Limit on searches for the changes of one configuration."""


@dataclass(frozen=True)
class Change:
    """A change with which the configuration fits."""

    values: dict[str, Any]
    """New values by the source's own keys."""
    plan: Plan | Served
    """The plan with these values."""

    @property
    def num_bytes(self) -> int:
        """Peak bytes of a GPU with this change."""
        return self.plan.num_bytes if isinstance(self.plan, Served) else self.plan.binding.num_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step with this change; 0 if unknown."""
        return 0.0 if isinstance(self.plan, Served) else self.plan.seconds


@dataclass(frozen=True)
class Asked:
    """Options of the command line beside the file."""

    hardware: str
    model: str | None = None
    """Model that replaces the one of the file."""
    overrides: Sequence[str] = ()
    """Overrides of the imported job, such as `workload.max_response_len=4096`."""
    fetch: Fetch | None = None


@dataclass(frozen=True)
class InOtherReleases:
    """The plan of the same configuration with releases of its stack in which it does not fit."""

    words: str
    """The releases, and the default in which they differ."""
    plan: Plan


@dataclass(frozen=True)
class Checked:
    """The answer of `rlplan check`."""

    imported: Imported
    plan: Plan | None
    """The plan as given; None where no layout can be built."""
    refusal: RlplanError | None
    """The reason for a missing plan."""
    changes: tuple[Change, ...]
    shorter: tuple[int, int] | None = None
    """Prompt and response lengths that fit, where the configuration does not fit at its limits."""
    served: Served | None = None
    """The engine, in place of a plan, where the file configures only an engine."""
    elsewhere: InOtherReleases | None = None
    """Releases in which the configuration does not fit, where it fits with the table's release."""

    @property
    def fits(self) -> bool:
        """Whether the configuration fits as given (`Plan.fits`), or its engine starts."""
        answer = self.served or self.plan
        return answer is not None and answer.fits

    def as_json(self) -> dict[str, Any]:
        """The answer as `rlplan check --json` prints it."""
        plan = self.plan
        answer: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "verdict": Verdict.DOES_NOT_FIT.value}
        if plan is not None:
            answer = {"schema_version": SCHEMA_VERSION, "verdict": plan.verdict.value, "results": results_as_json(plan)}
        if self.served is not None:
            answer |= {"verdict": self.served.verdict.value, "serving": self.served.as_json()}
        changes = [{"set": change.values, "verdict": change.plan.verdict.value} for change in self.changes]
        answer |= {"fits": self.fits, "changes": changes}
        return answer | {"fits_at_lengths": self.shorter} | self.imported.as_json()


def import_job(settings: Settings, asked: Asked) -> tuple[Imported, JobSpec]:
    """The imported configuration and its job. Raises: SpecError, NoFeasiblePlanError."""
    imported = convert(settings, asked.hardware, asked.model)
    try:
        job = job_from(imported.data, asked.overrides, fetch=asked.fetch)
    except SpecError as error:
        raise _translate_refusal(imported, asked, error) from None
    model = job.load_model()
    imported = _add_note(imported, read_stages(settings, job, model))
    for default in _find_released_defaults(settings, asked, model):
        imported = _add_note(imported, _describe_released_default(settings, default))
    states_cache = any(word.startswith("rollout.kv_cache_memory=") for word in asked.overrides)
    if imported.share is not None and not states_cache and job.has_rollouts:
        job = add_kv_cache(job, imported.share, settings.table.vllm)
    return imported, _limit_passes(job)


def _add_note(imported: Imported, note: str) -> Imported:
    return replace(imported, notes=(*imported.notes, note)) if note else imported


def _limit_passes(job: JobSpec) -> JobSpec:
    """The job with packed passes no larger than a rank's share of a mini-batch, where all lengths are equal.

    Counts: rollouts of a mini-batch over the data-parallel ranks, each with its prompt and response.
    """
    training, work = job.training, job.workload
    tokens = training.max_tokens_per_micro_batch
    if tokens == "auto" or work.response_lengths.kind != "constant":
        return job
    ranks = prod(count_ranks(getattr(training, axis)) for axis in ("ulysses", "tp", "pp", "cp"))
    # a larger pass would never be filled: a rank trains only its share of a mini-batch
    share = ceil_div(work.rollouts_per_mini_batch * ranks, job.hardware.num_devices)
    most = int(share * (work.usual_prompt_len + work.lengths.mean))
    changed = training.model_copy(update={"max_tokens_per_micro_batch": min(tokens, max(most, work.max_seq_len))})
    return job.model_copy(update={"training": changed})


def check(settings: Settings, asked: Asked) -> Checked:
    """The verdict on a configuration. Raises: SpecError for a wrong configuration."""
    imported = convert(settings, asked.hardware, asked.model)
    if settings.table.serves:
        return _check_served(settings, asked, imported)
    try:
        plan: Plan | None = plan_as_given(settings, asked)
        refusal = None
    except NoFeasiblePlanError as error:
        plan, refusal = None, replace_way_out(error, translate_way_out(imported, asked, error.way_out))
    except SpecError as error:
        raise _translate_refusal(imported, asked, error) from None
    if plan is not None:
        plan = plan.model_copy(
            update={
                "notes": (*plan.notes, *list_assumptions(plan)),
                "not_counted": (*plan.not_counted, *imported.not_counted),
            }
        )
        model = plan.job.load_model()
        imported = _add_note(imported, read_stages(settings, plan.job, model))
        for default in _find_released_defaults(settings, asked, model):
            imported = _add_note(imported, _describe_released_default(settings, default))
    if plan is not None and plan.verdict.may_fit:
        checked = _check_other_releases(settings, asked, imported, plan)
        if checked is not None or plan.fits:
            return checked or Checked(imported, plan, None, ())
    return Checked(
        imported,
        plan,
        refusal,
        tuple(_find_changes(settings, asked, plan)),
        _find_shorter_lengths(settings, asked, plan),
    )


def _find_released_defaults(settings: Settings, asked: Asked, model: ModelSpec) -> Iterator[ReleasedDefault]:
    """Defaults of other releases for keys that neither the file nor an override sets."""
    for default in settings.table.released_defaults:
        is_given = default.key in settings.entries or any(
            word.startswith(f"{default.ours}=") for word in asked.overrides
        )
        changes_it = model.experts is not None or not default.needs_experts
        if changes_it and not is_given and settings.holds(default.when):
            yield default


def _describe_released_default(settings: Settings, default: ReleasedDefault) -> str:
    """The note on an unset key: the value that is counted, and the default of other releases."""
    table = settings.table
    return (
        f"{default.key} is not set: {table.title} {table.version} uses {settings.value(default.follows)}, from "
        f"{default.follows.rpartition('.')[2]}, which is counted; {table.title} {default.versions} uses "
        f"{default.value}"
    )


def _check_other_releases(settings: Settings, asked: Asked, imported: Imported, plan: Plan) -> Checked | None:
    """The verdict on a configuration that may fit with the table's release; None if no other release is worse.

    It must fit in other releases too, because a file does not name the release that runs it. The first change sets the
    missing key, if there is one, so that every release uses the value that was counted.
    """
    for words, other, with_release, pinned in _list_other_releases(settings, asked, plan):
        answer = _try_values(other, with_release, {})
        if not isinstance(answer, Plan) or answer.fits:
            continue
        if (answer.fit.rank, answer.needed_bytes) <= (plan.fit.rank, plan.needed_bytes):
            continue
        elsewhere = InOtherReleases(words, answer)
        needs = f"{words}: " + " and ".join(short.needs for short in answer.shortages)
        unsure = plan.model_copy(update={"fit": Verdict.IN_EXPECTATION, "notes": (*plan.notes, needs)})
        if unsure.fits:  # the job accepts a verdict in expectation
            return Checked(imported, unsure, None, ())
        first = (Change(pinned, plan),) if pinned else ()
        others = islice(_find_changes(other, with_release, answer), MOST_REMEDIES - len(first))
        return Checked(imported, unsure, None, (*first, *others), elsewhere=elsewhere)
    return None


def _list_other_releases(
    settings: Settings, asked: Asked, plan: Plan
) -> Iterator[tuple[str, Settings, Asked, dict[str, Any]]]:
    """Other releases that may need more memory.

    Yields a description, the file and the options for that release, and the keys that pin the counted value.
    """
    title = settings.table.title
    for default in _find_released_defaults(settings, asked, plan.job.load_model()):
        words = f"with {title} {default.versions}, whose default of {default.key} is {default.value}"
        in_release = settings.replace_values({default.key: default.value})
        yield words, in_release, asked, {default.key: settings.value(default.follows)}
    if any(word.startswith("framework=") for word in asked.overrides):
        return
    counted, newer = plan.job, list_versions(plan.job.release.name)
    for before, version in zip(reversed(newer), list(reversed(newer))[1:], strict=False):
        label = f"{counted.release.name}@{version}"
        settled = settle(plan.asked.model_copy(update={"framework": label}))
        if settled.training.logits != counted.training.logits:
            words = (
                f"{title} {settings.table.version} computes its loss as {counted.training.logits}; before {title} "
                f"{before} ({settled.training.logits})"
            )
            yield words, settings, replace(asked, overrides=(*asked.overrides, f"framework={label}")), {}


def _check_served(settings: Settings, asked: Asked, imported: Imported) -> Checked:
    """The verdict on a file that configures only an engine."""
    served = _serve(settings, asked)
    if served.fits:
        return Checked(imported, None, None, (), served=served)
    shortened = settings.replace_values({LENGTH: served.length}) if served.length else settings
    return Checked(imported, None, None, tuple(_find_changes(shortened, asked, served)), served=served)


def _serve(settings: Settings, asked: Asked) -> Served:
    imported = convert(settings, asked.hardware, asked.model)
    return serve(settings, imported, job_from(imported.data, asked.overrides, fetch=asked.fetch))


def _find_shorter_lengths(settings: Settings, asked: Asked, plan: Plan | None) -> tuple[int, int] | None:
    """The longest of a half, a quarter and an eighth of the length limits at which the configuration fits."""
    if plan is None or any("_lengths" in word or "mean_" in word for word in asked.overrides):
        return None
    work = plan.job.workload
    for parts in (2, 4, 8):
        prompt, response = max(1, work.max_prompt_len // parts), max(1, work.max_response_len // parts)
        lengths = f"workload.response_lengths={{kind: constant, value: {response}}}"
        words = (*asked.overrides, f"workload.mean_prompt_len={prompt}", lengths)
        shorter = _try_values(settings, replace(asked, overrides=words), {})
        if isinstance(shorter, Plan) and shorter.fit.may_fit:  # the longest responses stay at the limits
            return prompt, response
    return None


def plan_as_given(settings: Settings, asked: Asked) -> Plan:
    """The plan of a configuration as it stands. Raises: SpecError, NoFeasiblePlanError."""
    _, job = import_job(settings, asked)
    plan = open_search(job).run(with_others=False, may_leave_idle=False)
    return plan.model_copy(update={"refusals": ()})  # refusals concern exports, and an imported file needs none


def _find_changes(settings: Settings, asked: Asked, as_given: Plan | Served | None) -> Iterator[Change]:
    """Up to MOST_REMEDIES changes that fit, the mildest first: in their effect on training, then in step time."""

    def sum_excess(plan: Plan | Served) -> float:
        shortages = () if isinstance(plan, Served) else plan.shortages
        return sum(short.needed_bytes - short.available_bytes for short in shortages)

    def plan_values(values: dict[str, Any]) -> Trial[Plan | Served] | None:
        plan = _try_values(settings, asked, values)
        if plan is None:
            return None
        fits = plan.fits and _fits_in_releases(settings, asked, values, plan)
        return Trial(plan, fits, sum_excess(plan))

    remedies = settings.table.remedies
    kinds = [Kind(steps, remedy.effect) for remedy in remedies if (steps := tuple(_list_steps(settings, remedy)))]
    effects = {remedy.key: remedy.effect for remedy in remedies}
    excess = sum_excess(as_given) if isinstance(as_given, Plan) else None
    changes = [Change(*entry) for entry in Combinations(kinds, plan_values, MOST_REMEDIES, MOST_TRIALS, excess)]
    order = {
        id(change): (max(effects.get(key, Effect.NONE) for key in change.values), change.seconds) for change in changes
    }
    yield from sorted(changes, key=lambda change: order[id(change)])[:MOST_REMEDIES]


def _fits_in_releases(settings: Settings, asked: Asked, values: dict[str, Any], plan: Plan | Served) -> bool:
    """Whether a change that fits with the table's release fits in other releases too."""
    if not isinstance(plan, Plan):
        return True
    others = _list_other_releases(settings.replace_values(values), asked, plan)
    answers = (_try_values(other, with_release, {}) for _, other, with_release, _ in others)
    return all(answer.fits for answer in answers if isinstance(answer, Plan))


def _try_values(settings: Settings, asked: Asked, values: dict[str, Any]) -> Plan | Served | None:
    """The plan, or the engine, with other values; None where the values are refused."""
    try:
        answer = _serve if settings.table.serves else plan_as_given
        return answer(settings.replace_values(values), asked)
    except RlplanError:
        return None


def _list_steps(settings: Settings, remedy: Remedy) -> Iterator[dict[str, Any]]:
    """Values of one remedy, smallest change first."""
    now = settings.value(remedy.key)
    if not settings.holds(remedy.when):
        return
    if remedy.to:
        for value in remedy.to:
            values = {remedy.key: value, **remedy.with_}
            if any(not matches(settings.resolve(key), wanted) for key, wanted in values.items()):
                yield _add_required(settings, values)
        return
    for _ in range(MOST_STEPS):
        if isinstance(now, bool) or not isinstance(now, int | float):
            return
        if not remedy.step and now * remedy.times % remedy.over:
            return
        now = round(now + remedy.step, 4) if remedy.step else now * remedy.times // remedy.over
        if not remedy.least <= now <= remedy.most:
            return
        yield {remedy.key: now, **remedy.with_}


def _add_required(settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    """The values with the keys that the stack requires only beside them."""
    before, after = settings.list_required(), settings.replace_values(values).list_required()
    return values | {key: value for key, value in after.items() if key not in before}


def _translate_refusal(imported: Imported, asked: Asked, error: SpecError) -> SpecError:
    """The refusal of the imported job in the source's keys."""
    way_out = translate_way_out(imported, asked, error.way_out)
    text = f"{error.what} {error.where} {error.rule}"
    entries = [entry for entry in imported.taken if entry.key and entry.ours in text]
    words = ", ".join(f"{entry.ours} from {entry.key} = {str(entry.theirs)[:MAX_SHOWN]}" for entry in entries[:4])
    file = Path(imported.settings.file).name
    return SpecError(
        error.what,
        where=f"{file}: {words}" if words else f"{file}: {error.where}",
        rule=error.rule,
        way_out=way_out
        or " or ".join(_find_accepted_defaults(imported, asked, entries))
        or _suggest_correction(entries)
        or OTHERS,
    )


def _find_accepted_defaults(imported: Imported, asked: Asked, came: Sequence[Taken]) -> Iterator[str]:
    """Overrides that restore upstream's default of a key, where the job is accepted with it."""
    settings = imported.settings
    for taken in came:
        default = settings.table.defaults.get(taken.key)
        if default is None or default == taken.theirs:
            continue
        try:
            job_from(
                convert(settings.replace_values({taken.key: default}), asked.hardware, asked.model).data,
                asked.overrides,
            )
        except RlplanError:
            continue
        yield format_options({taken.key: default})


def _suggest_correction(came: Sequence[Taken]) -> str:
    """The way out for keys without a known acceptable value."""
    return f"correct {' or '.join(taken.key for taken in came[:2])} in the file" if came else ""


def translate_way_out(imported: Imported, asked: Asked, way_out: str) -> str:
    """A way out with every job override translated to the stack's keys; empty where one has no translation.

    Keys of the hardware and keys that the user typed as overrides stay: they belong to the same command.
    """
    typed_keys = {word.partition("=")[0] for word in asked.overrides}
    theirs = {key for key in job_keys() if "." in key and not key.startswith("hardware.")} - typed_keys
    if theirs & set(_KEY.findall(_OVERRIDE.sub("", way_out))):
        return ""
    for override in dict.fromkeys(_OVERRIDE.findall(way_out)):
        key, _, value = override.partition("=")
        if key not in theirs:
            continue
        values = _find_their_values(imported, asked, key, parse_word(value))
        if values is None:
            return ""
        way_out = way_out.replace(override, format_options(values))
    return way_out


def _find_their_values(imported: Imported, asked: Asked, ours: str, wanted: Any) -> dict[str, Any] | None:
    """Values of the stack's keys that import as a job key's wanted value; None where no table row does.

    Every candidate is imported again, because rows that stand above may win.
    """
    settings = imported.settings
    for row in settings.table.rows.get(ours, ()):
        backwards = row.map or {wanted: wanted}
        for word in [word for word, mapped in backwards.items() if mapped == wanted] if row.key else ():
            conditions = {key: value for key, value in row.when.items() if not settings.holds({key: value})}
            values = {row.key: parse_word(str(word))} | conditions
            try:
                taken = convert(settings.replace_values(values), asked.hardware, asked.model).taken
            except SpecError:
                continue
            if any(entry.ours == ours and entry.value == wanted for entry in taken):
                return values
    return None


def format_assignments(values: Mapping[str, Any]) -> str:
    """Values in the syntax of a Hydra command line: `key=value`."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def format_options(values: Mapping[str, Any]) -> str:
    """Values as `--set` options of `rlplan check`."""
    return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in values.items())


def check_fits(checked: Checked) -> None:
    """Raises: NoFeasiblePlanError where the configuration does not fit."""
    if checked.fits:
        return
    changes = ", or ".join(format_options(change.values) for change in checked.changes)
    way_out = f"each of these alone helps: {changes}" if changes else OTHERS
    if checked.served is not None:
        raise checked.served.build_refusal(way_out)
    if checked.plan is None:
        error = checked.refusal
        assert error is not None, "what has no plan has a reason"
        raise replace_way_out(error, way_out if changes else error.way_out or OTHERS)
    if checked.elsewhere is not None:
        error, title = explain_misfit(checked.elsewhere.plan), checked.imported.settings.table.title
        raise NoFeasiblePlanError(
            f"{Verdict.IN_EXPECTATION.value}: {checked.elsewhere.words}, {error.what}",
            where=error.where,
            rule=f"the file names no release, so it must fit with every release of {title}",
            way_out=way_out,
        )
    raise replace_way_out(explain_misfit(checked.plan), way_out)


def replace_way_out(error: RlplanError, way_out: str) -> NoFeasiblePlanError:
    """The same refusal with another way out."""
    return NoFeasiblePlanError(error.what, where=error.where, rule=error.rule, way_out=way_out)
