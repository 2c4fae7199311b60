"""What is said beside a plan on GPUs, in words: GPUs that are idle and why, rows that do not divide, other placements.

In: the search over all GPUs, and the plan that was found. Out: sentences. Left out: how the plan was found (counts.py).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlplan.dataflow.choice import Choice
from rlplan.frameworks.profile import note_unread_release
from rlplan.planner.gpu.scored_candidates import ScoredCandidate
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Considered
from rlplan.spec.hardware.rates import format_bytes_per_s
from rlplan.spec.resolved import SettledJob
from rlplan.timing.network.slow_links import tcp_bytes_per_s
from rlplan.timing.transfer.weight_sync import CHANGED_SHARE
from rlplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rlplan.planner.gpu.search import GpuSearch


def notes_of(search: "GpuSearch", plan: Plan) -> Iterator[str]:
    """What a reader of a plan should know. search: over all GPUs that the job has."""
    is_part = plan.num_devices < search.setting.num_gpus
    if search.setting.has_pools and plan.job.hardware != search.job.hardware:
        yield _why_others(search, plan)
    elif is_part and search.job.objective not in ("gpus", "cost"):
        yield f"uses {plan.num_devices} of {search.setting.num_gpus} GPUs: {_why_fewer(search, plan)}"
    yield from search.chosen_words
    if unread := note_unread_release(search.job.framework):
        yield unread
    drafted = search.job.rollout.speculative_tokens
    if drafted and search.job.rollout.acceptance_rate is None:
        yield (
            f"rollout.speculative_tokens {drafted}: no rollout.acceptance_rate is stated, so seconds are counted as if "
            "no drafted token were taken"
        )
    yield from _over_link(search, plan)
    yield from _changes(search, plan)
    groups = plan.choice.arrangement.num_training // plan.choice.trainer.ranks_per_sequence
    units = search.job.num_units_per_mini_batch
    if units % groups:
        yield from _uneven(search, plan, units, groups)


def list_cut_passes(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Passes that hold fewer rollouts than was asked for, because a rank has no more of a mini-batch."""
    asked, trainer = job.workload.micro_batch_size_per_gpu, choice.trainer
    if asked == "auto" or job.training.max_tokens_per_micro_batch != "auto" or trainer.micro_batch >= asked:
        return
    groups = choice.arrangement.num_training // trainer.ranks_per_sequence
    yield (
        f"workload.micro_batch_size_per_gpu {asked} is more than a rank has: {job.workload.rollouts_per_mini_batch:,} "
        f"rollouts of a mini-batch over {groups} ranks leave {trainer.micro_batch} a pass"
    )


def _over_link(search: "GpuSearch", plan: Plan) -> Iterator[str]:
    """How weights reach places beyond a slow link."""
    linked, link = search.times.syncs.predict_link(plan.choice), search.setting.link
    if linked is None or link is None:
        return
    rate, tree = format_bytes_per_s(tcp_bytes_per_s(link)), linked.tree
    what = "what has changed" if plan.choice.sync_mode == "delta" else "weights"
    beside = "beside generation and training" if plan.choice.arrangement.is_async else "while both sides wait"
    ways = (
        f"each place passes them on to {tree.fan_out}, {tree.num_levels} levels" if link.num_places > 1 else "directly"
    )
    yield (
        f"{what}, {linked.num_bytes / 1e9:.3g} GB, take {format_seconds(linked.travels.seconds)} to {link.num_places} "
        f"place{'s' * (link.num_places > 1)} at {rate} ({ways}), {beside}"
    )


def _changes(search: "GpuSearch", plan: Plan) -> Iterator[str]:
    """What it brings within a cluster that what has changed travels alone."""
    if not plan.choice.sends_changes or search.setting.link is not None:
        return
    where, trainer, engine = plan.choice.arrangement, plan.choice.trainer, plan.choice.engine
    cost = search.of(plan).times.syncs.predict_cost
    whole = min(cost(where, trainer, engine, way).seconds for way in ("nccl", "disk"))
    now = cost(where, trainer, engine, plan.choice.sync_mode).seconds
    yield (
        f"what has changed travels ({CHANGED_SHARE:.0%} of the elements, assumed): {format_seconds(now)} instead of "
        f"{format_seconds(whole)} for all weights (placement.sync_content=full)"
    )


def _why_fewer(search: "GpuSearch", plan: Plan) -> str:
    count, hardware = search.setting.num_gpus, search.job.hardware
    if not search.lies_evenly:
        return f"{count} do not lie evenly on {hardware.num_hosts} hosts"
    if not search.space.arrangements:
        words = (
            f"no layout can be built for {count} ("
            + "; ".join(impossible.reason for impossible in search.space.impossible)
            + ")"
        )
        return "".join((words, *_with_batch(search, count)))
    whole = search.find_best().plan
    if whole.fit.rank > plan.fit.rank:
        return f"on all of them it {whole.fit.value}"
    this = "is faster" if plan.seconds < whole.seconds else "is as fast and simpler"
    words = f"the fastest layout of all of them takes {format_seconds(whole.seconds)} a step, this one {this}"
    return "".join((words, *(_with_batch(search, count) if search.job.backend != "deepspeed" else ())))


def _why_others(search: "GpuSearch", plan: Plan) -> str:
    """Why the first pool does not train while the second generates."""
    hardware, otherwise = plan.job.hardware, search.instead_of or "there is no layout"
    first, second = (f"{pool.num_gpus}x {pool.gpu.name}" for pool in search.setting.pools)
    if search.instead_of:
        first, second = second, first
    elif search.space.arrangements:
        whole = search.find_best().plan
        otherwise = f"{format_seconds(whole.seconds)} a step" if whole.fit.rank <= plan.fit.rank else whole.fit.value
    words = f"with {first} training and {second} generating: {otherwise}"
    if hardware.generation is None:
        return f"uses {plan.devices} alone, this is faster; {words}"
    return f"{hardware.profile} trains and {hardware.generation.profile} generates; {words}"


def _with_batch(search: "GpuSearch", groups: int) -> Iterator[str]:
    """What the nearest batch that so many ranks divide would bring."""
    other = nearest_batch(search.job, groups)
    other_search = None if other is None else search.replace_job(other)
    if other is not None and other_search is not None and other_search.space.arrangements:
        best = other_search.find_best().plan
        yield (
            f"; with workload.num_prompts_per_step={other.workload.num_prompts_per_step} it {best.fit.value}, "
            f"{format_seconds(best.seconds)} a step"
        )


def _uneven(search: "GpuSearch", plan: Plan, units: int, groups: int) -> Iterator[str]:
    """Ranks with more rollouts than others; and with the nearest batch that divides the same layout's step."""
    what = "pairs" if search.job.sequences_per_unit == 2 else "rollouts"
    words = f"{units:,} {what} are dealt out over {groups} ranks, to some one more than to others"
    other = nearest_batch(search.job, groups)
    if other is not None and plan.timing is not None:
        cache = plan.kv.kv_cache_memory_bytes if plan.kv else 0
        seconds = search.of(plan).replace_job(other).predict_step_s(plan.choice, cache)
        prompts = other.workload.num_prompts_per_step
        faster = plan.seconds * prompts / (seconds * search.job.workload.num_prompts_per_step) - 1
        words += (
            f"; workload.num_prompts_per_step={prompts} divides: {format_seconds(seconds)} a step, "
            f"{faster:+.1%} rollouts a second"
        )
    yield words


def nearest_batch(job: SettledJob, groups: int) -> SettledJob | None:
    """The job with as many prompts a step as are nearest to its own and as so many groups of ranks divide; None where
    its mini-batches leave no such number.
    """
    work, joins = job.workload, job.algorithm.declaration.joins_rollouts
    for distance in range(1, groups + 1):
        for prompts in (work.num_prompts_per_step - distance, work.num_prompts_per_step + distance):
            rollouts, rest = divmod(prompts * work.num_samples_per_prompt, work.num_mini_batches)
            if prompts < 1 or rest or (joins and rollouts % work.num_samples_per_prompt):
                continue
            size = {} if work.mini_batch_size is None else {"mini_batch_size": rollouts}
            changed = work.model_copy(update={"num_prompts_per_step": prompts, **size})
            other = job.model_copy(update={"workload": changed})
            units = other.num_units_per_mini_batch
            if units % groups == 0 and units >= groups:
                return other
    return None


def considered(search: "GpuSearch", candidate: ScoredCandidate, chosen_s: float) -> Considered:
    """Another placement by its best candidate, or by the nearest. chosen_s: seconds of the chosen layout's step."""
    setting, placement = search.setting, candidate.choice.arrangement.placement
    if candidate.need.slack_host < 0:
        needed, room = format_bytes(candidate.need.host), format_bytes(setting.host_capacity or 0)
        return Considered(placement, f"needs {needed} of a host's memory, {room} available")
    if candidate.rank == 2:
        where = f"{format_bytes(candidate.need.expected)} without KV cache, {format_bytes(setting.capacity)} available"
        has_room = candidate.need.expected <= setting.capacity
        return Considered(placement, f"no room for a KV cache: {where}" if has_room else f"needs {where}")
    words = "fits too" if candidate.rank == 0 else "fits in expectation only"
    words += f", {format_seconds(candidate.timing.seconds)} a step, "
    more = candidate.timing.seconds / chosen_s - 1
    if more >= 0 or candidate.rank:
        return Considered(placement, f"{words}{abs(more):.1%} {'slower' if more >= 0 else 'faster'}")
    words += f"as fast as the chosen {format_seconds(chosen_s)} within {SAME_SPEED:.0%}; the simpler layout is taken"
    return Considered(placement, words)
