"""Checks of a job against the rules of its framework: values that it states and the framework cannot say or run.

In: a SettledJob. Out: one problem with all of these values and the changes that clear them. Left out: values that are
left open, of which a search tries only what the rules allow (gpu/candidates.py).
"""

import shlex
from collections.abc import Iterator, Sequence

from rlplan.dataflow.choice import Choice
from rlplan.frameworks.profile import NAMES, find_release
from rlplan.frameworks.rules import Rule, RuleBook, word_of
from rlplan.planner.checks.placements import Problem
from rlplan.planner.setting import GpuSetting
from rlplan.spec.base import Spec
from rlplan.spec.models.shards import has_even_stages
from rlplan.spec.resolved import SettledJob, rule_book

ALGORITHM = "algorithm.name"
_LAYOUT = (
    *("framework", "scoring.", "hardware", "placement.", "training.", "rollout.", "limits."),
    "workload.micro_batch_size_per_gpu",
)
_LEARNED = ("training.lora", "training.optimizer", "training.dtype", "rollout.quantization", "rollout.kv_dtype")
"""Parts of those that are no layout: what is trained, and the numbers that rollouts are sampled with."""


def changes_learning(key: str) -> bool:
    """Whether another value of a key changes what is learned; if not, it changes the layout, memory and time alone.

    >>> changes_learning("training.pp"), changes_learning("workload.max_prompt_len"), changes_learning("training.lora")
    (False, True, True)
    """
    return not key.startswith(_LAYOUT) or key.startswith((*_LEARNED, "placement.max_staleness"))


def word_changes(overrides: Sequence[str]) -> str:
    """Overrides as a way out; what changes what is learned is named apart from what changes the layout alone.

    >>> word_changes(["training.backend=fsdp2", "algorithm.kl_in=loss"])
    'training.backend=fsdp2 and (this changes what is learned) algorithm.kl_in=loss'
    """
    layout = [shlex.quote(override) for override in overrides if not changes_learning(override.partition("=")[0])]
    learned = [shlex.quote(override) for override in overrides if changes_learning(override.partition("=")[0])]
    marked = ["(this changes what is learned)", *learned] if learned else []
    return " ".join([*layout, *["and"] * bool(layout and learned), *marked])


def check_framework(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Stated values that the framework cannot say or run, all of them at once."""
    book = rule_book(job)
    lacking = {rule.key: (rule, value) for rule, value in book.find_lacking() if not rule.reads_more}
    if not lacking:
        return
    title, rules = job.release.title, [rule for rule, _ in lacking.values()]
    yield (
        f"a plan for {title} has no "
        + ", no ".join(f"{key} = {_format_value(value)}" for key, (_, value) in lacking.items()),
        ", ".join(lacking),
        f"{title} {job.release.version}: "
        + "; ".join(f"{rule.key} is {_format_allowed(rule)} ({rule.why})" for rule in rules),
        _format_frameworks(job) if _lacks_algorithm(book) else word_changes(_list_changes(book)),
    )


def find_runtime_refusals(job: SettledJob) -> Iterator[str]:
    """What a job states and rlplan's own runtime does not have, each value with the change that clears it."""
    book = rule_book(job)
    way_out = " ".join(_list_changes(book))
    yield from (f"{rule.key} {_format_value(value)}: {rule.why} ({way_out})" for rule, value in book.find_lacking())


def find_export_refusals(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Why what a job states is planned for its framework and not written for it.

    Each reason ends with the changes after which an export writes all that is stated.
    """
    book, changes, reasons = rule_book(job), list[str](), list[str]()
    for rule, value in book.find_lacking():
        reasons.append(
            f"{rule.key} {_format_value(value)}: an export for {job.release.title} has {_format_allowed(rule)}: {rule.why}"
        )
    changes += _list_changes(book)
    counts_rollouts = job.release.scores_in_units_of_training and not choice.trainer.max_tokens
    for role in job.scored_roles if counts_rollouts else ():
        key = f"scoring.{role}.max_tokens_per_micro_batch"
        if (tokens := job.scoring.pass_of(role).max_tokens_per_micro_batch) != "auto":
            reasons.append(f"{key} {tokens}: passes are counted in rollouts, as training's are")
            changes.append(f"{key}=auto")
    pp = choice.trainer.pp
    if pp > 1 and not has_even_stages(model := job.load_model(), pp):
        groups = choice.arrangement.num_training * pp // choice.trainer.ranks_per_sequence
        even = max(size for size in range(1, pp) if groups % size == 0 and has_even_stages(model, size))
        reasons.append(
            f"training.pp {pp}: {model.num_layers} layers over {pp} stages leave others than the last unequal"
        )
        changes.append(f"training.pp={even}")
    way_out = " ".join(dict.fromkeys(changes))
    if _lacks_algorithm(book):
        way_out = _format_frameworks(job)
    yield from (f"{reason} ({way_out})" for reason in reasons)


def _lacks_algorithm(book: RuleBook) -> bool:
    return any(rule.key == ALGORITHM for rule, _ in book.find_lacking())


def _format_value(value: object) -> str:
    """A value in a message."""
    return "{...}" if isinstance(value, Spec) else word_of(value)


def _format_allowed(rule: Rule) -> str:
    """The values of a rule; `=KEY` is the value of that key."""
    return " or ".join(word_of(value).removeprefix("=") for value in rule.only)


def _list_changes(book: RuleBook) -> list[str]:
    """Overrides after which no stated value is lacking: a change may make another rule hold."""
    changes: dict[str, object] = {}
    while (lacking := next(book.beside(changes).find_lacking(), None)) is not None and lacking[0].key not in changes:
        changes[lacking[0].key] = book.beside(changes).cure(lacking[0])
    return [f"{key}={word_of(value)}" for key, value in changes.items()]


def _format_frameworks(job: SettledJob) -> str:
    """Frameworks that have the job's algorithm as it is stated, rlplan's own runtime last: it has every algorithm."""
    others = [name for name in NAMES if find_release(name).rules and not find_release(name).is_rlplan]
    able = [name for name in others if not _lacks_learning(job, name)]
    return " or ".join(f"framework={name}" for name in (*able, "rlplan"))


def _lacks_learning(job: SettledJob, name: str) -> bool:
    """Whether a framework lacks something of a job that changes what is learned."""
    there = job.model_copy(update={"framework": find_release(name).label})
    return any(changes_learning(rule.key) for rule, _ in rule_book(there).find_lacking())
