"""The two machines that a job is planned for, behind one interface: every choice on a CPU host, the best first on GPUs.

In: a JobSpec. Out: its Search. Left out: what is asked of a search (search.py, remedies.py, answers/).
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
from rlplan.spec.resolved import on_a_cpu_host, settle
from rlplan.units import format_seconds

STALENESS = (0, 1, 2, 4, 8)
"""Versions that are tried where a job leaves them open. Source: no report of training that learns as well beyond 8
(AReaL, arXiv 2505.24298; ScaleRL, arXiv 2510.13786)."""

DRAFTS = (0, 1, 2, 3, 4, 6, 8)
"""Tokens drafted at a time that are tried where a job leaves them open."""
ONE_BY_ONE = {"placement.max_staleness": STALENESS, "rollout.speculative_tokens": DRAFTS}
"""Keys that are searched by a search for each value, the least value first."""


class Search(Protocol):
    """The search of one job's open choices. The job has been checked against its models and its machine."""

    def run(self, *, with_others: bool = True, may_leave_idle: bool = True) -> Plan:
        """The best candidate, or where none fits the nearest. with_others: and what else there was. may_leave_idle:
        whether fewer devices may be taken.

        Raises: SpecError where sizes do not divide, NoFeasiblePlanError where nothing can be built.
        """
        ...

    def find_better_plan(self, verdict: Verdict) -> Plan | None:
        """The best candidate with a better verdict than that; None where there is none."""
        ...

    def pareto(self) -> tuple[Alternative, ...]:
        """The fastest candidates that surely fit, where more headroom costs time."""
        ...

    def of(self, plan: Plan) -> "Search":
        """The search on the devices of a plan of this job: on fewer GPUs, or on others of two kinds."""
        ...

    def predict_step_s(self, choice: Choice, kv_cache: int) -> float:
        """Seconds of a step of one candidate with so many bytes of KV cache; 0 where they are not known."""
        ...


def search_of(asked: JobSpec, memo: Memo | None = None) -> Search:
    """The search of a job. memo: of searches for jobs like it. Raises: SpecError for the first thing in it that could
    not run.
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

        return HostSearch(on_a_cpu_host(asked), asked)
    from rlplan.planner.checks.gpus import check_job
    from rlplan.planner.gpu.search import GpuSearch
    from rlplan.planner.setting import read_setting

    job = settle(asked)
    setting = read_setting(job)
    search = GpuSearch(job, setting, asked, memo)
    try:
        check_job(job, setting)
    except SpecError as error:
        other = next(
            (other_search for other_search in search.list_other_pools() if other_search.setting.has_pools), None
        )
        if other is None:
            raise
        other.instead_of = error.what
        return other
    return search


def _check_runs_on_a_host(asked: JobSpec) -> None:
    """Raises: SpecError for a framework that trains on GPUs alone."""
    if not asked.release.is_rlplan:
        raise SpecError(
            f"framework is {asked.framework}, hardware {asked.hardware.profile}",
            where="framework, hardware",
            rule=f"{asked.release.title} trains on GPUs; rlplan's own runtime trains on CPU hosts too",
            way_out="hardware=8xH100 or framework=rlplan",
        )


def _choose_framework(asked: JobSpec, memo: Memo) -> Search:
    """The search for rlplan's own runtime, or for verl where that does not run the policy or the trainer."""
    own = _set_key(asked, "framework", "rlplan")
    if asked.device_kind == "cpu":
        return search_of(own, memo)
    if not asked.release.is_rlplan:
        return search_of(_set_key(asked, "framework", asked.release.label), memo)
    from rlplan.planner.gpu.search import GpuSearch
    from rlplan.planner.rules import model_refusals

    job = settle(own)
    reason = next(model_refusals(job), None)
    if reason is None:
        return search_of(own, memo)
    label = find_release("verl").label
    search = search_of(_set_key(asked, "framework", label), memo)
    assert isinstance(search, GpuSearch), "models of CPU hosts are for rlplan's own runtime"
    search.chosen_words = (f"framework auto is {label}: {reason}", *search.chosen_words)
    return search


def _try_values(asked: JobSpec, key: str, memo: Memo) -> Search:
    """The search with the least value of a key of ONE_BY_ONE with which a step is as fast as with more."""
    from rlplan.planner.gpu.search import GpuSearch

    if asked.device_kind == "cpu" or not asked.has_rollouts or not _can_win(asked, key):
        return search_of(_set_key(asked, key, 0), memo)
    results: dict[int, tuple[int, float]] = {}
    for value in ONE_BY_ONE[key]:
        plan = search_of(_set_key(asked, key, value), memo).run(with_others=False)
        results[value] = plan.verdict.rank, plan.seconds
    best = min(results.values())
    chosen = next(
        value for value, (rank, seconds) in results.items() if rank == best[0] and seconds <= best[1] * (1 + SAME_SPEED)
    )
    search = search_of(_set_key(asked, key, chosen), memo)
    assert isinstance(search, GpuSearch), "a CPU host has no such key to search"
    steps = ", ".join(f"{value}: {format_seconds(seconds)}" for value, (_, seconds) in results.items())
    search.chosen_words += (f"{key} auto is {chosen}: a step takes, with {steps}",)
    return search


def _can_win(asked: JobSpec, key: str) -> bool:
    """Whether more than 0 may be faster: drafts of an unknown acceptance rate are never chosen."""
    if key == "placement.max_staleness":
        return asked.placement.placement not in ("colocated", "hybrid")
    return asked.rollout.acceptance_rate is not None


def settled_like(asked: JobSpec, planned: JobSpec) -> JobSpec:
    """The job with what `search_of` settles before it searches, where it leaves that open: as the job of a plan has it.

    A plan keeps the job that was asked about but for these keys.
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
