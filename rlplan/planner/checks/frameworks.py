"""Checks of a job's values against its framework: what its config files can express and what it can run.

In: a SettledJob. Out: one problem with all unsupported values and the changes that remove them. Left out: open values,
for which the search tries only what the rules allow (gpu/candidates.py).
"""

import shlex
from collections.abc import Iterator, Sequence

from rlplan.dataflow.choice import Choice
from rlplan.frameworks.profile import NAMES, find_release
from rlplan.frameworks.rules import Rule, RuleBook, format_value
from rlplan.planner.checks.placements import Problem
from rlplan.planner.setting import GpuSetting
from rlplan.spec.base import Spec
from rlplan.spec.models.shards import has_even_stages
from rlplan.spec.resolved import SettledJob, build_rule_book

ALGORITHM = "algorithm.name"
_LAYOUT = (
    *("framework", "scoring.", "hardware", "placement.", "training.", "rollout.", "limits."),
    "workload.micro_batch_size_per_gpu",
)
_LEARNED = ("training.lora", "training.optimizer", "training.dtype", "rollout.quantization", "rollout.kv_dtype")
"""Exceptions among these prefixes that affect learning: what is trained, and the number formats of rollouts."""


def changes_learning(key: str) -> bool:
    """Whether a key changes what is learned, and not only layout, memory and time.

    >>> changes_learning("training.pp"), changes_learning("workload.max_prompt_len"), changes_learning("training.lora")
    (False, True, True)
    """
    return not key.startswith(_LAYOUT) or key.startswith((*_LEARNED, "placement.max_staleness"))


def format_changes(overrides: Sequence[str]) -> str:
    """Format overrides as a way out, with those that change learning marked.

    >>> format_changes(["training.backend=fsdp2", "algorithm.kl_in=loss"])
    'training.backend=fsdp2 and (this changes what is learned) algorithm.kl_in=loss'
    """
    layout = [shlex.quote(override) for override in overrides if not changes_learning(override.partition("=")[0])]
    learned = [shlex.quote(override) for override in overrides if changes_learning(override.partition("=")[0])]
    marked = ["(this changes what is learned)", *learned] if learned else []
    return " ".join([*layout, *["and"] * bool(layout and learned), *marked])


def check_framework(job: SettledJob, setting: GpuSetting) -> Iterator[Problem]:
    """Find all stated values that the framework does not support."""
    book = build_rule_book(job)
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
        _format_frameworks(job) if _lacks_algorithm(book) else format_changes(_list_changes(book)),
    )


def find_runtime_refusals(job: SettledJob) -> Iterator[str]:
    """Reasons why rlplan's runtime does not support stated values, each with the change that removes it."""
    book = build_rule_book(job)
    way_out = " ".join(_list_changes(book))
    yield from (f"{rule.key} {_format_value(value)}: {rule.why} ({way_out})" for rule, value in book.find_lacking())


def find_export_refusals(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Reasons why a plan for a framework cannot be exported to it.

    Each reason ends with the changes after which an export writes everything.
    """
    book, changes, reasons = build_rule_book(job), list[str](), list[str]()
    for rule, value in book.find_lacking():
        allowed = f"an export for {job.release.title} has {_format_allowed(rule)}"
        reasons.append(f"{rule.key} {_format_value(value)}: {allowed}: {rule.why}")
    changes += _list_changes(book)
    counts_rollouts = job.release.scores_in_units_of_training and not choice.trainer.max_tokens
    for role in job.scored_roles if counts_rollouts else ():
        key = f"scoring.{role}.max_tokens_per_micro_batch"
        if (tokens := job.scoring.get_pass(role).max_tokens_per_micro_batch) != "auto":
            reasons.append(f"{key} {tokens}: micro-batches are counted in rollouts, as in training")
            changes.append(f"{key}=auto")
    pp = choice.trainer.pp
    if pp > 1 and not has_even_stages(model := job.load_model(), pp):
        groups = choice.arrangement.num_training * pp // choice.trainer.ranks_per_sequence
        # pp 1 always divides, so there is always a smaller even size
        even = max(size for size in range(1, pp) if groups % size == 0 and has_even_stages(model, size))
        reasons.append(f"training.pp {pp}: {model.num_layers} layers do not divide evenly over {pp} stages")
        changes.append(f"training.pp={even}")
    way_out = " ".join(dict.fromkeys(changes))
    if _lacks_algorithm(book):
        way_out = _format_frameworks(job)
    yield from (f"{reason} ({way_out})" for reason in reasons)


def _lacks_algorithm(book: RuleBook) -> bool:
    return any(rule.key == ALGORITHM for rule, _ in book.find_lacking())


def _format_value(value: object) -> str:
    """Format a value for a message."""
    return "{...}" if isinstance(value, Spec) else format_value(value)


def _format_allowed(rule: Rule) -> str:
    """Format the values that a rule allows; `=KEY` is the value of that key."""
    return " or ".join(format_value(value).removeprefix("=") for value in rule.only)


def _list_changes(book: RuleBook) -> list[str]:
    """List overrides that remove all unsupported values. A change may activate another rule, so the rules are applied
    repeatedly.
    """
    changes: dict[str, object] = {}
    # a change can activate another rule; a key that returns cannot be cured and ends the loop
    while (lacking := next(book.replace_values(changes).find_lacking(), None)) is not None and lacking[
        0
    ].key not in changes:
        changes[lacking[0].key] = book.replace_values(changes).cure(lacking[0])
    return [f"{key}={format_value(value)}" for key, value in changes.items()]


def _format_frameworks(job: SettledJob) -> str:
    """Format the frameworks that support the job's algorithm; rlplan's runtime, which supports all, comes last."""
    return " or ".join(f"framework={name}" for name in (*list_able_frameworks(job), "rlplan"))


def list_able_frameworks(job: SettledJob) -> tuple[str, ...]:
    """List the other frameworks that learn the same from a job, the usual choice (verl) first."""
    with_rules = [name for name in NAMES if find_release(name).rules and not find_release(name).is_rlplan]
    return tuple(name for name in with_rules if not _lacks_learning(job, name))


def _lacks_learning(job: SettledJob, name: str) -> bool:
    """Whether a framework lacks something of a job that changes what is learned."""
    there = job.model_copy(update={"framework": find_release(name).label})
    return any(changes_learning(rule.key) for rule, _ in build_rule_book(there).find_lacking())
