"""A plan in another stack's own keys: the rows of its table read backwards, and held to what they say forwards.

In: a Plan, the name of a stack. Out: its settings, and a folder with the file that starts it; EmitError for what it
cannot say, for what is read back from the settings is the plan's job. Left out: data and rewards.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplan.errors import EmitError, RlplanError, SpecError, did_you_mean
from rlplan.foreign.convert import MEMORY, SHARES, convert, first_of
from rlplan.foreign.documents import flat
from rlplan.foreign.engine_share import share_of, with_kv_cache
from rlplan.foreign.settings import Settings, matches, word_of
from rlplan.foreign.table import Row, Table, load_table
from rlplan.planner.plan import Plan
from rlplan.spec.base import writing

TARGETS = ("verl", "openrlhf", "slime", "nemo_rl")
"""Stacks that a plan can be written for."""
SAME_CACHE = 0.02
"""By which part the KV cache may differ: shares have four digits."""


def exported(plan: Plan, target: str) -> tuple[Table, dict[str, Any]]:
    """The settings of a stack that say what a plan chose. Raises: EmitError."""
    table = load_table(target)
    wanted = _wanted(plan)
    settings = Settings(table, plan.job.name, {}, dict(table.defaults))
    for ours in table.rows:
        if ours in wanted and not ours.startswith("hardware."):
            settings = _said(settings, plan, ours, wanted)
    settings = _on_hosts(settings, plan)
    _check(settings, plan, wanted)
    return table, {key: one.value for key, one in settings.given.items() if table.defaults.get(key, "~") != one.value}


def _wanted(plan: Plan) -> dict[str, Any]:
    """Our keys as the plan has them; passes in rollouts or in tokens, as they were chosen."""
    found = {key: value for key, value in flat(plan.job.model_dump(mode="json")).items() if value is not None}
    found["policy.path"] = plan.model_name
    unused = "workload.micro_batch_size_per_gpu" if plan.choice.trainer.max_tokens else _TOKENS
    found.pop(unused, None)
    if plan.choice.engine.sleep_level == 0:
        found.pop("rollout.sleep_level", None)
    for key in ("algorithm.overlong_buffer", "placement.max_staleness"):
        if not found[key]:
            found.pop(key)
    if found["placement.offload"] == "none":
        found.pop("placement.offload_roles", None)
    return found


_TOKENS = "training.max_tokens_per_micro_batch"


def _said(settings: Settings, plan: Plan, ours: str, wanted: dict[str, Any]) -> Settings:
    """With the least that says a key of ours, contradicts nothing before it, and is read back as that."""
    alternatives, defaults = settings.table.rows[ours], settings.table.defaults
    found: list[tuple[int, int, dict[str, Any]]] = []
    for index, row in enumerate(alternatives):
        said = _alternative(settings, plan, row, wanted[ours], wanted)
        if said is not None:
            changed = {key: one for key, one in said.items() if defaults.get(key, "~") != one or key in settings.given}
            if all(key not in settings.given or settings.value(key) == one for key, one in changed.items()):
                found.append((len(changed), index, changed))
    for _, _, changed in sorted(found, key=lambda one: one[:2]):
        after = settings.with_values(changed)
        after.ours.update({key: value for key, value in wanted.items() if key != ours})
        back = first_of(after, ours, alternatives, [])
        if back is not None and (back[1].convert in SHARES or _same(back[0].value, wanted[ours])):
            return settings.with_values(changed)
    return settings


def _alternative(settings: Settings, plan: Plan, row: Row, value: Any, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Foreign keys with which a row says a value; None where it cannot."""
    if row.is_old or not all(matches(wanted[key], one) for key, one in row.when.items() if key in wanted):
        return None
    said = dict(_spelled({key: one for key, one in row.when.items() if key not in wanted}))
    if row.key:
        theirs = _backwards(settings, plan, row, value, wanted)
        return None if theirs is None else {**said, row.key: theirs}
    return said if word_of(row.value) == word_of(value) else None


def _spelled(conditions: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that make conditions hold; bounds are left to the rows of their keys."""
    for key, one in conditions.items():
        first = one[0] if isinstance(one, list | tuple) else one
        if first is not None and not (isinstance(first, str) and first.startswith(">")):
            yield key, first


def _backwards(settings: Settings, plan: Plan, row: Row, value: Any, wanted: dict[str, Any]) -> Any:
    """Their value for ours; None where there is none."""
    if row.map is not None:
        found = next((theirs for theirs, ours in row.map.items() if word_of(ours) == word_of(value)), None)
        return {"true": True, "false": False}.get(found, found) if found is not None else None
    if row.convert in SHARES:
        return share_of(plan, settings.table.vllm, is_static=row.convert == "static_share")
    if row.convert == "mebibytes":
        return int(value) >> 20
    if row.part:
        return int(value / row.part) if int(int(value / row.part) * row.part) == value else None
    if row.plus or not all(isinstance(settings.value(key), int) for key in row.minus):
        return None
    if row.minus:
        value += sum(settings.value(key) for key in row.minus)
    for keys, is_factor in ((row.over, True), (row.times, False)):
        for key in keys:
            factor = wanted[key] if key in wanted else settings.value(key)
            if not isinstance(factor, int) or (not is_factor and value % factor):
                return None
            value = value * factor if is_factor else value // factor
    return value


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or word_of(one) == word_of(other)


def _on_hosts(settings: Settings, plan: Plan) -> Settings:
    """With the number of hosts, and of GPUs on each."""
    hardware = plan.job.hardware
    rows = [row for row in settings.table.rows["hardware.num_devices"] if row.times and not row.plus]
    hosts = hardware.num_hosts if isinstance(hardware.num_hosts, int) else 1
    return (
        settings.with_values({rows[0].key: hardware.num_devices // hosts, rows[0].times[0]: hosts})
        if rows
        else settings
    )


def _check(settings: Settings, plan: Plan, wanted: dict[str, Any]) -> None:
    """What is read back is the plan's job. Raises: EmitError."""
    table, hardware = settings.table, f"{plan.num_devices}x{plan.job.hardware.profile}"
    try:
        found = convert(settings, hardware, None)
        back = {one.ours: one.value for one in found.taken}
        if found.share is not None and MEMORY in wanted:
            there = with_kv_cache(plan.job, found.share, table.vllm).rollout.kv_cache_memory
            if abs(int(there) - wanted[MEMORY]) <= SAME_CACHE * wanted[MEMORY]:
                back[MEMORY] = wanted[MEMORY]
    except RlplanError as error:
        raise EmitError(error.what, where=error.where, rule=error.rule, way_out=error.way_out) from None
    keys = [key for key in table.rows if key in wanted and not key.startswith("hardware.")]
    said = [key for key in keys if key in back or key.startswith(_MUST_SAY)]
    lost = [key for key in said if not _same(back.get(key), wanted[key]) and key not in _UNSAID]
    if lost:
        words = ", ".join(f"{key} = {wanted[key]} ({word_of(back.get(key))} is read back)" for key in lost[:4])
        raise EmitError(
            f"{table.title} cannot say {words}",
            where=f"plan of {plan.job.name}, target {table.title} {table.version}",
            rule="what is read back from the settings is the plan's job",
            way_out=f"plan the job with what it can say, such as {lost[0]}={word_of(back.get(lost[0]))}",
        )


_UNSAID = frozenset({"training.logits", "placement.sync_bucket", "algorithm.kl_in", "algorithm.kl_estimator"})
"""Keys that a stack may have by itself alone: how it takes its loss and sends its weights, forms of a KL."""
_MUST_SAY = ("training.zero", "training.lora", "workload.num_prompts", "workload.num_samples", "workload.mini_batch")
"""Keys that are lost where nothing says them; others are without effect there."""


def write_export(plan: Plan, target: str, folder: Path) -> list[Path]:
    """The folder with the file that starts a stack, and a README. Raises: EmitError, SpecError."""
    if target not in TARGETS:
        raise SpecError(
            f"'{target}' is no stack that a plan can be written for",
            where="command line: --target",
            rule=f"one of {', '.join(TARGETS)}.{did_you_mean(target, TARGETS)}",
            way_out="leave it out for rlplan's own bundle",
        )
    table, settings = exported(plan, target)
    start = "train.yaml" if target == "nemo_rl" else "train.sh"
    text = _yaml(settings) if target == "nemo_rl" else _script(table, settings)
    command = f"python examples/run_grpo.py --config {start}" if target == "nemo_rl" else f"bash {start}"
    readme = (
        f"# {plan.job.name} for {table.title} {table.version}\n\nMade by rlplan from a plan for {plan.devices}. "
        f"Start it with `{command}`, with the data and rewards of your own in it.\n\n"
        "Everything that is not named there has the stack's default.\n"
    )
    written = [folder / start, folder / "README.md"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(text, encoding="utf-8")
        written[1].write_text(readme, encoding="utf-8")
    return written


def _script(table: Table, settings: dict[str, Any]) -> str:
    words = [f"python3 -m {table.entries[0]}" if "." in table.entries[0].removesuffix(".py") else "python3 train.py"]
    preset = next((name for name, values in table.presets.items() if values.items() <= settings.items()), None)
    if preset is not None and table.syntax == "overrides":
        words.append(f"--config-name={preset}")
    for key, value in settings.items():
        quoted = shlex.quote(str(value))
        if table.syntax == "overrides":
            words.append(f"{key}={quoted}")
        elif value is not False:
            words.append(
                f"--{key.replace('_', '-') if table.title == 'slime' else key}" + f" {quoted}" * (value is not True)
            )
    return "#!/bin/bash\nset -x\n" + " \\\n    ".join(words) + ' "$@"\n'


def _yaml(settings: dict[str, Any]) -> str:
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        inner = nested
        for part in above:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return "defaults: grpo_math_1B.yaml\n" + "".join(f"{key}: {json.dumps(one)}\n" for key, one in nested.items())
