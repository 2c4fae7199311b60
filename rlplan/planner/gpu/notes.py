"""Notes on a plan for GPUs: why GPUs stay idle, uneven batches, and why other placements lost.

In: the search over all GPUs, and the plan that it found. Out: sentences. Left out: how the plan was found (search.py).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlplan.dataflow.choice import Choice
from rlplan.frameworks.profile import note_unread_release
from rlplan.planner.gpu.scored_candidates import ScoredCandidate
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Considered
from rlplan.planner.setting import GpuSetting
from rlplan.spec.resolved import SettledJob
from rlplan.timing.transfer.weight_sync import CHANGED_SHARE
from rlplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rlplan.planner.gpu.search import GpuSearch


class PlanNotes:
    """Notes on a plan. search: the search over all GPUs of the job, which may be more than the plan uses."""

    def __init__(self, search: "GpuSearch", plan: Plan) -> None:
        self.search, self.plan = search, plan
        self.job, self.setting = search.job, search.setting

    def __iter__(self) -> Iterator[str]:
        plan, rollout = self.plan, self.job.rollout
        is_part = plan.num_devices < self.setting.num_gpus
        if self.setting.has_pools and plan.job.hardware != self.job.hardware:
            yield self._explain_pools()
        elif is_part and self.job.objective not in ("gpus", "cost"):
            yield f"uses {plan.num_devices} of {self.setting.num_gpus} GPUs: {self._explain_idle_gpus()}"
        yield from self.search.chosen_words
        if unread := note_unread_release(self.job.framework):
            yield unread
        if rollout.speculative_tokens and rollout.acceptance_rate is None:
            yield (
                f"rollout.speculative_tokens {rollout.speculative_tokens}: rollout.acceptance_rate is not stated, so "
                "step times assume that no drafted token is accepted"
            )
        yield from self._note_delta_sync()
        yield from self._note_uneven_batch()

    def _note_delta_sync(self) -> Iterator[str]:
        """Compare a delta sync within a cluster with a sync of all weights."""
        choice = self.plan.choice
        if not choice.sends_changes:
            return
        arrangement, trainer, engine = choice.arrangement, choice.trainer, choice.engine
        predict_cost = self.search.restrict_to_plan(self.plan).times.syncs.predict_cost
        full_s = min(predict_cost(arrangement, trainer, engine, mode).seconds for mode in ("nccl", "disk"))
        delta_s = predict_cost(arrangement, trainer, engine, choice.sync_mode).seconds
        yield (
            f"delta sync sends {CHANGED_SHARE:.0%} of the elements (assumed): {format_seconds(delta_s)} instead of "
            f"{format_seconds(full_s)} for all weights (placement.sync_content=full)"
        )

    def _explain_idle_gpus(self) -> str:
        count, plan = self.setting.num_gpus, self.plan
        if not self.search.lies_evenly:
            return f"{count} do not divide evenly over {self.job.hardware.num_hosts} hosts"
        if not self.search.space.arrangements:
            reasons = "; ".join(impossible.reason for impossible in self.search.space.impossible)
            return f"no layout can be built for {count} ({reasons}){self._describe_fitting_batch(count)}"
        full = self.search.find_best().plan
        if full.fit.rank > plan.fit.rank:
            return f"on all {count} it {full.fit.value}"
        reason = "is faster" if plan.seconds < full.seconds else "is as fast and simpler"
        # rlplan's own runtime packs uneven shares, so for it another batch size would change nothing
        batch = self._describe_fitting_batch(count) if self.job.backend != "deepspeed" else ""
        return (
            f"the fastest layout on all {count} takes {format_seconds(full.seconds)} a step, this one {reason}{batch}"
        )

    def _explain_pools(self) -> str:
        """Explain why the first pool does not train while the second generates."""
        hardware, search = self.plan.job.hardware, self.search
        first, second = (f"{pool.num_gpus}x {pool.gpu.name}" for pool in self.setting.pools)
        alternative = search.instead_of or "no layout can be built"
        if search.instead_of:
            first, second = second, first
        elif search.space.arrangements:
            full = search.find_best().plan
            fits_as_well = full.fit.rank <= self.plan.fit.rank
            alternative = f"{format_seconds(full.seconds)} a step" if fits_as_well else full.fit.value
        words = f"with {first} training and {second} generating: {alternative}"
        if hardware.generation is None:
            return f"uses {self.plan.devices} alone, which is faster; {words}"
        return f"{hardware.profile} trains and {hardware.generation.profile} generates; {words}"

    def _describe_fitting_batch(self, groups: int) -> str:
        """Describe the plan with the nearest batch size that `groups` ranks divide; empty if there is none."""
        dividing_job = nearest_batch(self.job, groups)
        search = None if dividing_job is None else self.search.replace_job(dividing_job)
        if dividing_job is None or search is None or not search.space.arrangements:
            return ""
        best = search.find_best().plan
        return (
            f"; with workload.num_prompts_per_step={dividing_job.workload.num_prompts_per_step} it {best.fit.value}, "
            f"{format_seconds(best.seconds)} a step"
        )

    def _note_uneven_batch(self) -> Iterator[str]:
        """Report ranks with unequal numbers of rollouts, and the step time with the nearest batch that divides."""
        plan, job = self.plan, self.job
        groups = plan.choice.arrangement.num_training // plan.choice.trainer.ranks_per_sequence
        units = job.num_units_per_mini_batch
        if units % groups == 0:
            return
        unit = "pairs" if job.sequences_per_unit == 2 else "rollouts"
        words = f"{units:,} {unit} do not divide evenly over {groups} ranks"
        dividing_job = nearest_batch(job, groups)
        if dividing_job is not None and plan.timing is not None:
            cache = plan.kv.kv_cache_memory_bytes if plan.kv else 0
            seconds = self.search.restrict_to_plan(plan).replace_job(dividing_job).predict_step_s(plan.choice, cache)
            prompts = dividing_job.workload.num_prompts_per_step
            speedup = plan.seconds * prompts / (seconds * job.workload.num_prompts_per_step) - 1
            words += (
                f"; workload.num_prompts_per_step={prompts} does: {format_seconds(seconds)} a step, "
                f"{speedup:+.1%} rollouts a second"
            )
        yield words


def list_cut_passes(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Note a stated micro-batch size that exceeds a rank's share of a mini-batch."""
    asked, trainer = job.workload.micro_batch_size_per_gpu, choice.trainer
    if asked == "auto" or job.training.max_tokens_per_micro_batch != "auto" or trainer.micro_batch >= asked:
        return
    groups = choice.arrangement.num_training // trainer.ranks_per_sequence
    yield (
        f"workload.micro_batch_size_per_gpu {asked} exceeds a rank's share: {job.workload.rollouts_per_mini_batch:,} "
        f"rollouts per mini-batch over {groups} ranks allow micro-batches of {trainer.micro_batch}"
    )


def nearest_batch(job: SettledJob, groups: int) -> SettledJob | None:
    """Find the job with the nearest number of prompts per step that `groups` groups of ranks divide.

    None if its mini-batches allow no such number.
    """
    work, joins = job.workload, job.algorithm.declaration.joins_rollouts
    for distance in range(1, groups + 1):
        for prompts in (work.num_prompts_per_step - distance, work.num_prompts_per_step + distance):
            rollouts, remainder = divmod(prompts * work.num_samples_per_prompt, work.num_mini_batches)
            if prompts < 1 or remainder or (joins and rollouts % work.num_samples_per_prompt):
                continue
            size = {} if work.mini_batch_size is None else {"mini_batch_size": rollouts}
            changed = work.model_copy(update={"num_prompts_per_step": prompts, **size})
            candidate = job.model_copy(update={"workload": changed})
            units = candidate.num_units_per_mini_batch
            if units % groups == 0 and units >= groups:
                return candidate
    return None


def explain_candidate(setting: GpuSetting, candidate: ScoredCandidate, chosen_s: float) -> Considered:
    """Explain why another placement's best or nearest candidate was not chosen. chosen_s: step of the chosen layout."""
    need, placement = candidate.need, candidate.choice.arrangement.placement
    if need.slack_host < 0:
        room = format_bytes(setting.host_capacity or 0)
        return Considered(placement, f"needs {format_bytes(need.host)} of a host's memory, {room} available")
    if candidate.rank == 2:
        sizes = f"{format_bytes(need.expected)} without KV cache, {format_bytes(setting.capacity)} available"
        has_room = need.expected <= setting.capacity
        return Considered(placement, f"no room for a KV cache: {sizes}" if has_room else f"needs {sizes}")
    words = "fits too" if candidate.rank == 0 else "fits in expectation only"
    words += f", {format_seconds(candidate.timing.seconds)} a step, "
    difference = candidate.timing.seconds / chosen_s - 1
    if difference >= 0 or candidate.rank:
        return Considered(placement, f"{words}{abs(difference):.1%} {'slower' if difference >= 0 else 'faster'}")
    words += f"within {SAME_SPEED:.0%} of the chosen {format_seconds(chosen_s)}; the simpler layout is taken"
    return Considered(placement, words)
