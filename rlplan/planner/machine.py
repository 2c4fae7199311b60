"""Both kinds of search behind one interface: CPU hosts score all choices, GPUs are searched best first.

In: a JobSpec. Out: its Search. Left out: questions to a search (search.py, remedies.py, answers/).
"""

from operator import attrgetter
from typing import Any, Protocol

from rlplan.dataflow.choice import Choice
from rlplan.errors import SpecError
from rlplan.frameworks.profile import find_release
from rlplan.planner.margins import SAME_SPEED
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Alternative, Verdict
from rlplan.spec.job import JobSpec
from rlplan.spec.resolved import resolve_on_cpu, settle
from rlplan.units import format_seconds

STALENESS = (0, 1, 2, 4, 8)
"""Values tried for `max_staleness: auto`. Source: no report shows equal learning beyond 8 (AReaL, arXiv 2505.24298;
ScaleRL, arXiv 2510.13786)."""

DRAFTS = (0, 1, 2, 3, 4, 6, 8)
"""Values tried for `speculative_tokens: auto`."""
ONE_BY_ONE = {"placement.max_staleness": STALENESS, "rollout.speculative_tokens": DRAFTS}
"""Keys that need one search per value, the smallest value first."""


class Search(Protocol):
    """The search over one job's open choices. The job is already checked against its models and machine."""

    def run(self, *, with_others: bool = True, may_leave_idle: bool = True) -> Plan:
        """Find the best candidate, or the nearest one if none fits.

        with_others: add the alternatives. may_leave_idle: whether the plan may use fewer devices.

        Raises: SpecError if sizes do not divide, NoFeasiblePlanError if no layout can be built.
        """
        ...

    def find_better_plan(self, verdict: Verdict) -> Plan | None:
        """Find the best candidate with a better verdict than `verdict`; None if there is none."""
        ...

    def find_pareto_front(self) -> tuple[Alternative, ...]:
        """List the fastest candidates that fit in the worst case at increasing headroom."""
        ...

    def restrict_to_plan(self, plan: Plan) -> "Search":
        """The search restricted to the devices of a plan: fewer GPUs, or another use of two kinds of GPUs."""
        ...

    def predict_step_s(self, choice: Choice, kv_cache: int) -> float:
        """Predict a candidate's step seconds with `kv_cache` bytes of KV cache; 0 if unknown."""
        ...


def open_search(asked: JobSpec, memo: Memo | None = None) -> Search:
    """Open the search for a job. memo: shared with searches for similar jobs.

    Raises: SpecError for the first part of the job that cannot run.
    """
    memo = memo or Memo()
    if asked.framework == "auto":
        return _choose_framework(asked, memo)
    if asked.placement.max_staleness == "auto":
        return _try_values(asked, "placement.max_staleness", memo)
    if asked.rollout.speculative_tokens == "auto":
        return _try_values(asked, "rollout.speculative_tokens", memo)
    if asked.device_kind == "cpu":
        from rlplan.planner.cpu.search import HostSearch

        _check_runs_on_a_host(asked)

        return HostSearch(resolve_on_cpu(asked), asked)
    from rlplan.planner.checks.gpus import check_job
    from rlplan.planner.gpu.search import GpuSearch
    from rlplan.planner.setting import read_setting

    job = settle(asked)
    setting = read_setting(job)
    search = GpuSearch(job, setting, asked, memo)
    try:
        check_job(job, setting)
    except SpecError as error:
        # the requested roles of the pools cannot run; exchanged roles may
        other = next((pools for pools in search.list_other_pools() if pools.setting.has_pools), None)
        if other is None:
            raise
        other.instead_of = error.what
        return other
    return search


def _check_runs_on_a_host(asked: JobSpec) -> None:
    """Raise SpecError for a framework that trains on GPUs only."""
    if not asked.release.is_rlplan:
        raise SpecError(
            f"framework is {asked.framework}, hardware is {asked.hardware.profile}",
            where="framework, hardware",
            rule=f"{asked.release.title} trains on GPUs only; rlplan's runtime also trains on CPU hosts",
            way_out="hardware=8xH100 or framework=rlplan",
        )


def _choose_framework(asked: JobSpec, memo: Memo) -> Search:
    """Open the search for rlplan's runtime, or for another framework if rlplan cannot run the policy or the trainer."""
    own = _set_key(asked, "framework", "rlplan")
    if asked.device_kind == "cpu":
        return open_search(own, memo)
    if not asked.release.is_rlplan:
        return open_search(_set_key(asked, "framework", asked.release.label), memo)
    from rlplan.planner.checks.frameworks import list_able_frameworks
    from rlplan.planner.gpu.search import GpuSearch
    from rlplan.planner.rules import find_model_refusals

    job = settle(own)
    reason = next(find_model_refusals(job), None)
    if reason is None:
        return open_search(own, memo)
    label = find_release(next(iter(list_able_frameworks(job)), "verl")).label
    search = open_search(_set_key(asked, "framework", label), memo)
    assert isinstance(search, GpuSearch), "models of CPU hosts are for rlplan's own runtime"
    search.chosen_words = (f"framework auto is {label}: {reason}", *search.chosen_words)
    return search


def _try_values(asked: JobSpec, key: str, memo: Memo) -> Search:
    """Open the search with the smallest value of `key` that is as fast as larger values."""
    from rlplan.planner.gpu.search import GpuSearch

    if asked.device_kind == "cpu" or not asked.has_rollouts or not _can_win(asked, key):
        return open_search(_set_key(asked, key, 0), memo)
    results: dict[int, tuple[int, float]] = {}
    for value in ONE_BY_ONE[key]:
        plan = open_search(_set_key(asked, key, value), memo).run(with_others=False)
        results[value] = plan.verdict.rank, plan.seconds
    # (rank, seconds): a better verdict wins over speed
    best_rank, fastest = min(results.values())
    limit = fastest * (1 + SAME_SPEED)
    chosen = next(value for value, (rank, seconds) in results.items() if rank == best_rank and seconds <= limit)
    search = open_search(_set_key(asked, key, chosen), memo)
    assert isinstance(search, GpuSearch), "a CPU host has no such key to search"
    steps = ", ".join(f"{value}: {format_seconds(seconds)}" for value, (_, seconds) in results.items())
    search.chosen_words += (f"{key} auto is {chosen}; step times by value: {steps}",)
    return search


def _can_win(asked: JobSpec, key: str) -> bool:
    """Whether a value above 0 can be faster. Speculative decoding needs a known acceptance rate."""
    if key == "placement.max_staleness":
        return asked.placement.placement not in ("colocated", "hybrid")
    return asked.rollout.acceptance_rate is not None


def settle_keys(asked: JobSpec, planned: JobSpec) -> JobSpec:
    """Copy the keys that are settled before a search from a planned job, if `asked` leaves them open.

    A plan keeps the job that was asked except for these keys.
    """
    for key in ("framework", *ONE_BY_ONE):
        value = attrgetter(key)
        if value(asked) == "auto":
            asked = _set_key(asked, key, value(planned))
    return asked


def _set_key(asked: JobSpec, key: str, value: Any) -> JobSpec:
    part, _, name = key.partition(".")
    if not name:
        return asked.model_copy(update={key: value})
    return asked.model_copy(update={part: getattr(asked, part).model_copy(update={name: value})})
