"""Export of a plan to another stack's keys: its table rows read backwards, then imported again as a check.

In: a Plan, the name of a stack. Out: the stack's settings, and job keys that it has no setting for; EmitError where the
settings import as another job. Left out: files (folders.py), data and rewards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from rlplan.errors import EmitError, RlplanError
from rlplan.foreign.convert import MEMORY, SHARES, convert, find_first
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.engine_share import add_kv_cache, find_share
from rlplan.foreign.export.experiment import apply_fixed, check_fixed, list_fixed_keys, list_learning_keys
from rlplan.foreign.pipeline import write_stages
from rlplan.foreign.settings import Settings
from rlplan.foreign.table import SOURCES, Row, Table, load_table
from rlplan.frameworks.profile import find_release
from rlplan.frameworks.rules import format_value, matches
from rlplan.planner.checks.frameworks import format_changes
from rlplan.planner.plan import Plan
from rlplan.spec.base import validate
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import find_model_path, format_model_name
from rlplan.spec.resolved import ResolvedJob
from rlplan.units import ceil_div
from rlplan.vocabulary import Placement, Role

SAME_CACHE = 0.02
"""Relative difference that a KV cache may have after import: engines allocate whole blocks."""
ADAPTERS = "training.lora.rank"
_OTHERS = "another target, of which `rlplan emit --help` has the list"


def _refuse_lost(table: Table, plan: Plan, lost: dict[str, Any], wanted: dict[str, Any]) -> EmitError:
    """The refusal of keys that the stack cannot express, with the values that import reads back."""
    words = [f"{key} = {wanted.get(key, 'null')} ({format_value(value)} is read back)" for key, value in lost.items()]
    changes = [
        "training.lora=null" if key == ADAPTERS and value is None else f"{key}={format_value(value)}"
        for key, value in lost.items()
    ]
    makes_less = any(key.startswith("workload.") and key != _ROLLOUTS for key in lost)
    return EmitError(
        f"{table.title} has no settings for {', '.join(words[:4])}",
        where=f"plan of {plan.job.name}, target {table.title} {table.version}",
        rule="the exported settings import as the plan's job",
        way_out=_OTHERS if makes_less else f"plan the job with values that it has: {format_changes(changes)}",
    )


@dataclass(frozen=True)
class Export:
    """A plan in a stack's keys."""

    table: Table
    settings: dict[str, Any]
    """Foreign settings that differ from upstream's defaults."""
    unsaid: dict[str, Any]
    """Job keys without a foreign setting, with the plan's values, where these are not the job's defaults."""
    longest: int
    """Tokens of the longest sequence."""


def name_hardware(plan: Plan) -> str:
    """A plan's GPUs in the syntax of `--hardware`: `8xh100-sxm`, `8xdgx-h100` for eight nodes of eight."""
    hardware = plan.job.hardware
    pools = [(hardware.num_devices, hardware.profile)]
    if hardware.generation is not None:
        pools.append((hardware.generation.num_devices, hardware.generation.profile))
    return " + ".join(f"{_count_nodes(count, profile)}x{profile}" for count, profile in pools)


def _count_nodes(num_devices: int, profile: str) -> int:
    node = find_profile(profile, where="hardware.profile")
    return num_devices // node.num_gpus if isinstance(node, NodeProfile) else num_devices


def export_plan(plan: Plan, target: str) -> Export:
    """The settings of a stack that express a plan. Raises: EmitError."""
    is_given = not plan.job.has_rollouts and f"{target}_given" in SOURCES
    table = load_table(f"{target}_given" if is_given else target)
    _check_framework(table, plan)
    _check_devices(table, plan)
    wanted = _list_wanted(plan, table)
    settings = _add_hosts(Settings(table, plan.job.name, {}, dict(table.defaults)), plan)
    ours_to_say = [ours for ours in table.rows if ours in wanted and not ours.startswith("hardware.")]
    for _ in range(2):  # a row may depend on a key that a later row writes
        unsaid = []
        for ours in ours_to_say:
            before = settings
            settings = _add_key(settings, plan, ours, wanted)
            unsaid += [ours] * (settings is before)
        ours_to_say = unsaid
    # the rest depends on the keys that rows have set: what they require, and mirrored settings of other roles
    settings = settings.replace_values(_complete_pairs(settings, wanted))
    settings = settings.replace_values(settings.list_required())
    settings = settings.replace_values(write_stages(table, plan, plan.job.load_model()))
    settings = apply_fixed(settings, wanted)
    settings = settings.replace_values(_mirror_roles(settings, plan))
    back = _check(settings, plan, wanted)
    check_fixed(settings, plan, wanted)
    written = {
        key: entry.value
        for key, entry in settings.entries.items()
        if key not in table.parts and table.defaults.get(key, "~") != entry.value
    }
    written |= settings.list_required()
    return Export(table, written, dict(_list_unsaid(plan, wanted, back)), plan.job.workload.max_seq_len)


def _check_framework(table: Table, plan: Plan) -> None:
    """Raises: EmitError for a plan of another framework, whose step has other passes."""
    name = find_release(table.framework).name
    if table.trains and name != plan.job.release.name:
        raise EmitError(
            f"the plan is for {plan.job.release.title}, the target is {table.title}",
            where=f"plan of {plan.job.name}: framework = {plan.job.framework}, target {table.title} {table.version}",
            rule="a plan belongs to one framework, whose step has its own passes",
            way_out=f"plan the job with framework={name} (rlplan plan JOB --for {name} -o plan.json)",
        )


def _complete_pairs(settings: Settings, wanted: dict[str, Any]) -> dict[str, Any]:
    """Both values of a flag with two values, where only one of them differs from its default."""
    values = {row.key: wanted[ours] for ours, rows in settings.table.rows.items() for row in rows if ours in wanted}
    begun = {key[:-2] for key in settings.entries if key.endswith((".0", ".1"))}
    return {key: value for key, value in values.items() if key.endswith((".0", ".1")) and key[:-2] in begun}


def _mirror_roles(settings: Settings, plan: Plan) -> dict[str, Any]:
    """The policy's settings under the keys of other roles that share its layout."""
    table, added = settings.table, dict[str, Any]()
    roles = dict.fromkeys((Role.POLICY, *plan.job.scored_roles))
    for begins, mirrored in (pair for role in roles for pair in table.of_roles.get(role, {}).items()):
        for key, entry in settings.entries.items():
            own = mirrored + key.removeprefix(begins)
            usual = table.defaults.get(own, table.defaults.get(key, "~"))
            is_own = key in table.parts or own in settings.entries
            if key.startswith(begins) and not is_own and usual != entry.value:
                added[own] = entry.value
    return added


def _list_unsaid(plan: Plan, wanted: dict[str, Any], back: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Job keys of a step that import does not read back and that differ from the defaults."""
    usual = _list_defaults(plan)
    for key, value in wanted.items():
        if key.startswith(_OF_A_STEP) and key not in back and value not in (usual.get(key), False, 1, "none"):
            yield key, value


def _list_defaults(plan: Plan) -> dict[str, Any]:
    """The job keys of a job with defaults only."""
    answers = {"policy": plan.model_name, "hardware": "8xH100", "algorithm": plan.job.algorithm.name}
    return flatten_keys(validate(JobSpec, JobSpec.expand_short_forms(answers), file="defaults").model_dump(mode="json"))


_OF_A_STEP = ("algorithm.", "workload.", "training.", "rollout.", "placement.", "roles.")


def _list_wanted(plan: Plan, table: Table) -> dict[str, Any]:
    """The plan's job keys that an export must express.

    Passes are sized in rollouts or in tokens, whichever the plan chose and the stack supports.
    """
    wanted = {key: value for key, value in flatten_keys(plan.job.model_dump(mode="json")).items() if value is not None}
    wanted["policy.path"] = plan.asked.policy.path if find_model_path(plan.asked.policy.path) else plan.model_name
    wanted |= {f"roles.{role}.path": format_model_name(path) for role, path in plan.job.roles.paths.items()}
    wanted.pop(_ROLLOUTS if plan.choice.trainer.max_tokens else _TOKENS, None)
    if _ROLLOUTS in table.rows and _TOKENS not in table.rows:
        wanted[_ROLLOUTS] = _find_even_passes(plan, table)
    wanted = {key: value for key, value in wanted.items() if not (key.startswith(_OF_ROLES) and value == "auto")}
    if plan.job.release.scores_in_units_of_training and plan.choice.trainer.max_tokens:
        wanted = _score_in_tokens(wanted, plan.job)
    if wanted["rollout.quantization"] == "none":
        wanted.pop("rollout.quantization")
    if plan.choice.engine.sleep_level == 0:
        wanted.pop("rollout.sleep_level", None)
    if not wanted["placement.max_staleness"]:
        wanted.pop("placement.max_staleness")
    if "placement.max_staleness" not in wanted:
        wanted.pop("placement.partial_rollouts", None)  # without staleness no rollout runs during a weight sync
    if wanted["rollout.engine"] == "auto":
        wanted.pop("rollout.engine")  # the stack chooses its engine
    if plan.job.algorithm.declaration.has_value and plan.job.algorithm.value_learning_rate is None:
        wanted["algorithm.value_learning_rate"] = plan.job.algorithm.learning_rate
    if plan.job.load_model().experts is None:
        wanted.pop("training.etp", None)
    if wanted["placement.offload"] == "none":
        wanted.pop("placement.offload_roles", None)
    learned = {"algorithm.name", *list_learning_keys(plan.job)}  # another key has no effect, or would enable something
    return {key: value for key, value in wanted.items() if not key.startswith("algorithm.") or key in learned}


def _score_in_tokens(wanted: dict[str, Any], job: ResolvedJob) -> dict[str, Any]:
    """The job keys with scoring passes in tokens: each rollout counts at its maximum length, as in training passes."""
    sizes = {
        f"scoring.{role}.micro_batch_size_per_gpu": f"scoring.{role}.max_tokens_per_micro_batch"
        for role in job.scored_roles
    }
    packed = {tokens: wanted[size] * job.workload.max_seq_len for size, tokens in sizes.items() if size in wanted}
    return {key: value for key, value in wanted.items() if key not in sizes} | packed


_TOKENS, _ROLLOUTS = "training.max_tokens_per_micro_batch", "workload.micro_batch_size_per_gpu"


def _find_even_passes(plan: Plan, table: Table) -> int:
    """Rollouts per pass for a stack without token-based passes; the number divides a rank's mini-batch.

    Raises: EmitError where the job sets a number that does not divide it.
    """
    work, micro = plan.job.workload, plan.job.workload.micro_batch_size_per_gpu
    share = max(1, work.mini_batch_size // plan.schedule.find_layout("policy_trainer").dp)
    even = next(size for size in range(min(micro, share), 0, -1) if share % size == 0)
    if plan.choice.trainer.max_tokens is None and even != micro:
        raise EmitError(
            f"{table.title} cannot split {share} rollouts per rank and optimizer step into passes of {micro}",
            where=f"plan of {plan.job.name}: {_ROLLOUTS}, target {table.title} {table.version}",
            rule="all passes have one size, which divides a rank's part of a mini-batch",
            way_out=f"plan the job with {_ROLLOUTS}={even}",
        )
    return even


def _add_key(settings: Settings, plan: Plan, ours: str, wanted: dict[str, Any]) -> Settings:
    """The settings with the fewest values that express a job key.

    The values contradict no earlier setting, and import reads the key back from them.
    """
    alternatives, defaults = settings.table.rows[ours], settings.table.defaults
    candidates: list[tuple[int, int, dict[str, Any]]] = []
    for index, row in enumerate(alternatives):
        written = _write_row(settings, plan, row, wanted[ours], wanted)
        if written is not None and all(
            key not in settings.entries or settings.value(key) == value for key, value in written.items()
        ):
            candidates.append((sum(defaults.get(key, "~") != value for key, value in written.items()), index, written))
    for _, index, written in sorted(candidates, key=lambda candidate: candidate[:2]):
        after = settings.replace_values(written)
        after.ours.update({key: value for key, value in wanted.items() if key != ours})
        back = find_first(after, ours, alternatives, [])
        is_share = back is not None and back[1].convert in SHARES
        if is_share and back is not None and back[1].convert != alternatives[index].convert:
            continue  # vLLM's fraction and SGLang's cover different memory
        if back is not None and (is_share or _are_equal(back[0].value, wanted[ours])):
            return settings.replace_values(written)
    return settings


def _write_row(settings: Settings, plan: Plan, row: Row, value: Any, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Foreign keys with which a row expresses a value; None where it cannot."""
    if (
        row.is_only_read
        or row.refused
        or not all(matches(wanted[key], condition) for key, condition in row.when.items() if key in wanted)
    ):
        return None
    written = dict(_satisfy(settings, {key: condition for key, condition in row.when.items() if key not in wanted}))
    written |= {key: prod(wanted[factor] for factor in factors) for key, factors in row.written.items()}
    if not all(matches(written[key], row.when[key]) for key in row.written):
        return None
    if row.key:
        if (row.above is not None and value <= row.above) or (row.below is not None and value >= row.below):
            return None
        theirs = _invert(settings, plan, row, value, wanted)
        return None if theirs is None else {**written, row.key: theirs}
    constant = row.value * prod(wanted[factor] for factor in row.times) if row.times else row.value
    is_number = isinstance(constant, int | float) and not isinstance(constant, bool) and not isinstance(value, bool)
    return (
        written if format_value(constant) == format_value(value) or (is_number and constant == value) else None
    )  # 0 and 0.0


def _satisfy(settings: Settings, conditions: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that satisfy conditions; among several, the current one.

    Bounds, `*` and parts of words are left to the rows of their keys.
    """
    for key, condition in conditions.items():
        is_given = (
            key in settings.entries and isinstance(condition, list | tuple) and matches(settings.value(key), condition)
        )
        first = settings.value(key) if is_given else condition[0] if isinstance(condition, list | tuple) else condition
        is_left = isinstance(first, dict) or (isinstance(first, str) and first.startswith((">", "<", "*")))
        if first is not None and not is_left:
            yield key, first


def _invert(settings: Settings, plan: Plan, row: Row, value: Any, wanted: dict[str, Any]) -> Any:
    """The foreign value for a job value; None without one."""
    if row.map is not None:
        words = [theirs for theirs, ours in row.map.items() if format_value(ours) == format_value(value)]
        current = format_value(settings.entries[row.key].value) if row.key in settings.entries else ""
        word = current if current in words else next(iter(words), None)
        return {"true": True, "false": False}.get(word, word) if word is not None else None
    if row.convert in SHARES:
        return find_share(plan, settings.table.vllm, is_static=row.convert == "static_share")
    if row.convert == "mebibytes":
        return int(value) >> 20
    if row.part:
        return int(value / row.part) if int(int(value / row.part) * row.part) == value else None

    def look_up(key: str) -> Any:
        return wanted[key] if key in wanted else settings.value(key)

    if row.plus or not all(isinstance(look_up(key), int) for key in row.minus):
        return None
    if row.minus:
        value += sum(look_up(key) for key in row.minus)
    for keys, is_factor in ((row.over, True), (row.times, False)):
        for key in keys:
            factor = look_up(key)
            if not isinstance(factor, int) or (not is_factor and value % factor):
                return None
            value = value * factor if is_factor else value // factor
    return value


def _are_equal(first: Any, second: Any) -> bool:
    return bool(first == second) or format_value(first) == format_value(second)


def _add_hosts(settings: Settings, plan: Plan) -> Settings:
    """The settings with the numbers of hosts and GPUs; of the training GPUs alone, where the stack adds the others."""
    hardware, rows = plan.job.hardware, settings.table.rows
    counts = [row for row in rows.get("hardware.num_devices", ()) if not row.is_only_read]
    hosts, arrangement = hardware.num_hosts if isinstance(hardware.num_hosts, int) else 1, plan.choice.arrangement
    for row in counts:
        if row.plus or row.minus:
            continue
        num_gpus = hardware.num_devices
        if arrangement.placement is Placement.DISAGGREGATED and any(other.plus for other in counts):
            num_gpus = arrangement.num_training
            hosts = _count_hosts(num_gpus, hardware.num_devices // hosts)
        if not row.times:
            return settings.replace_values({row.key: num_gpus, rows["hardware.num_hosts"][0].key: hosts})
        return settings.replace_values({row.key: num_gpus // hosts, row.times[0]: hosts})
    return settings


def _count_hosts(num_gpus: int, most_on_each: int) -> int:
    """The fewest hosts with the same number of these GPUs on each.

    >>> [_count_hosts(num_gpus, 8) for num_gpus in (4, 12, 16)]
    [1, 2, 2]
    """
    return next(n for n in range(ceil_div(num_gpus, most_on_each), num_gpus + 1) if num_gpus % n == 0)


def _check_devices(table: Table, plan: Plan) -> None:
    """Raises: EmitError for a plan on a CPU host."""
    if plan.is_on_host:
        raise EmitError(
            f"{table.title} is written for GPUs, the plan is for {plan.devices}",
            where=f"plan of {plan.job.name}: hardware, target {table.title} {table.version}",
            rule="the stack's settings describe GPUs",
            way_out="plan the job with hardware=8xH100",
        )


def _check(settings: Settings, plan: Plan, wanted: dict[str, Any]) -> dict[str, Any]:
    """The job keys that import reads back. Raises: EmitError where they differ from the plan's job."""
    table, hardware = settings.table, name_hardware(plan)
    try:
        imported = convert(settings, hardware, None if "policy.path" in table.rows else plan.model_name)
        back = {entry.ours: entry.value for entry in imported.taken}
        if imported.share is not None and MEMORY in wanted:
            there = add_kv_cache(plan.job, imported.share, table.vllm).rollout.kv_cache_memory
            if abs(int(there) - wanted[MEMORY]) <= SAME_CACHE * wanted[MEMORY]:
                back[MEMORY] = wanted[MEMORY]
    except RlplanError as error:
        raise EmitError(
            f"{table.title} cannot run a plan of {wanted.get('algorithm.name', plan.job.algorithm.name)}: {error.what}",
            where=f"plan of {plan.job.name}, target {table.title} {table.version}",
            rule=error.rule,
            way_out=_OTHERS,
        ) from None
    rows = {
        key: alternatives for key, alternatives in table.rows.items() if not all(row.is_assumed for row in alternatives)
    }
    keys = [key for key in rows if key in wanted and not key.startswith("hardware.")]
    must_say = _list_required_keys(settings, plan, wanted)
    sized = tuple(f"scoring.{role}." for role in plan.job.scored_roles if plan.asked.scoring.get_pass(role).is_stated)
    stated = [key for key in keys if key in back or key.startswith((*_MUST_SAY, *sized))]
    stated += [key for key in must_say if key not in stated]
    lost = {key: back.get(key) for key in stated if not _are_equal(back.get(key), wanted[key]) and key not in _UNSAID}
    lost |= {key: "auto" for key in lost if key.startswith(sized) and key not in back}
    if unsaid := [key for key in must_say if key in lost and key not in back]:
        usual = _list_defaults(plan)
        lost |= {key: usual.get(key) for key in unsaid}
    if not plan.job.has_rollouts and sum(back.get(key, 0) for key in _LENGTHS) == sum(wanted[key] for key in _LENGTHS):
        lost = {key: value for key, value in lost.items() if key not in _LENGTHS}  # one limit bounds both together
    lost |= {key: back[key] for key in (_TOKENS, _ROLLOUTS, _STALENESS) if key in back and key not in wanted}
    if lost:
        raise _refuse_lost(table, plan, lost, wanted)
    return back


def _list_required_keys(settings: Settings, plan: Plan, wanted: dict[str, Any]) -> list[str]:
    """Job keys that change what is learned: the stack must set them, or have them as defaults."""
    if not settings.table.trains:
        return []
    fixed = list_fixed_keys(settings, wanted)
    return [key for key in list_learning_keys(plan.job) if key in wanted and key not in fixed]


_OF_ROLES = ("scoring.", "roles.value.training.")
_STALENESS = "placement.max_staleness"
_LENGTHS = ("workload.max_prompt_len", "workload.max_response_len")
_UNSAID = frozenset({"training.logits", "placement.sync_bucket"})
"""Keys that may differ in an export: the stack decides how it computes its loss and sends its weights."""
_MUST_SAY = ("training.zero", "training.lora", "workload.num_prompts", "workload.num_samples", "workload.mini_batch")
"""Prefixes of keys that an export must express; without a setting, other keys have no effect in the stack."""
