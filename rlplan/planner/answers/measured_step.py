"""Check whether a measured step is normal: its phases against the prediction, the largest gap and its likely cause.

In: a JobSpec, a MeasuredStep from a run's folder or another framework's log. Out: a StepReport. Left out: reading logs
(foreign/logs), candidate causes (causes.py), rendering.

The prediction is the best plan of the job with the measured lengths, because other lengths are another workload. A
phase is normal if it lies within the range of nine of ten measurements (measured_errors.py). Where too few were
measured, up to twice the prediction is normal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.answers.causes import Cause, list_causes
from rlplan.planner.answers.changes import Change, ask
from rlplan.planner.answers.plan_results import list_overrides
from rlplan.planner.machine import open_search
from rlplan.planner.measured_errors import MeasuredError, find_phase_error, find_step_error
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import override_job
from rlplan.spec.job import JobSpec
from rlplan.spec.measured_lengths import fit_lengths
from rlplan.spec.parts.lengths import ConstantLengths
from rlplan.timing.step import StepTiming
from rlplan.units import format_seconds
from rlplan.vocabulary import Phase

STEP_REPORT_SCHEMA_VERSION = 1
LEAST_SHARE = 0.05
"""Minimum gap to be named, as a share of the measured step."""
BETWEEN = "between"
"""Name of the time in a step that belongs to no measured phase."""
SHORTEST_NORMAL = 0.6
"""Share of the predicted seconds below which no step is called normal, however wide the interval is."""
MANY_CUT = 0.1
"""Share of responses at the length cap above which a remark is made."""


@dataclass(frozen=True)
class OptimizerSteps:
    """Seconds of the optimizer steps of a log with one row for each."""

    mean_s: float
    """Mean over all steps."""
    generating_s: float | None = None
    """Seconds of a step that generates rollouts; None if the log does not tell them apart."""
    buffered_s: float = 0.0
    """Seconds of a step that trains on rollouts of an earlier one."""
    per_generation: int = 0
    """Optimizer steps for each generation in the log; 0 if unknown."""


@dataclass(frozen=True)
class MeasuredStep:
    """Measurements of a usual step."""

    stack: str
    """Framework that wrote the log."""
    num_steps: int
    """Number of timed steps."""
    step_s: float | None
    """Seconds of the step; None if not recorded."""
    phases: dict[Phase, float]
    """Seconds of each recorded phase."""
    lengths: dict[str, float]
    """Recorded values among mean_response_len, longest_response_len, mean_prompt_len, mean_seq_len (tokens) and
    cut_share (0 to 1)."""
    covers: dict[str, Phase] = field(default_factory=dict)
    """Patterns of action ids, mapped to the phase whose timer includes them."""
    unread: tuple[str, ...] = ()
    """Log fields that look like timers and that no table maps."""
    optimizer_steps: OptimizerSteps | None = None
    """The log's rows, if each is an optimizer step instead of a step of the job."""

    @property
    def seconds(self) -> float:
        """Seconds of the step, or the sum of its phases if the step was not recorded."""
        return sum(self.phases.values()) if self.step_s is None else self.step_s


@dataclass(frozen=True)
class PhaseGap:
    """Measured and predicted seconds of a phase."""

    phase: str
    """Phase name, `step` for the whole step, or `between` for unassigned time."""
    measured_s: float
    predicted_s: float
    longest_normal: float
    """Largest normal ratio of measured to predicted seconds."""

    @property
    def gap_s(self) -> float:
        """Measured minus predicted seconds; negative if the phase was faster."""
        return self.measured_s - self.predicted_s

    @property
    def ratio(self) -> float | None:
        """Ratio of measured to predicted seconds; None if nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None

    @property
    def is_normal(self) -> bool:
        """Whether the phase is within the usual prediction error."""
        return self.measured_s <= self.longest_normal * self.predicted_s

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools."""
        own = {"gap_s": self.gap_s, "ratio": self.ratio, "is_normal": self.is_normal}
        own |= {"longest_normal": self.longest_normal}
        return {"phase": self.phase, "measured_s": self.measured_s, "predicted_s": self.predicted_s} | own


@dataclass(frozen=True)
class StepReport:
    """Comparison of a measured step with its prediction."""

    plan: Plan
    """The plan that serves as prediction."""
    overrides: tuple[str, ...]
    """Measured lengths as overrides."""
    measured: MeasuredStep
    gaps: tuple[PhaseGap, ...]
    """Gap of the step, then of its phases in order."""
    largest: PhaseGap | None
    """Largest abnormal gap; None if all are normal."""
    causes: tuple[Cause, ...]
    """Possible causes of that gap, the likeliest first."""
    tail_s: float = 0.0
    """Further seconds that count as normal, because nothing tells how the lengths spread around their mean."""

    @property
    def is_normal(self) -> bool:
        """Whether every phase is within the usual prediction error, and the step is not too short for the job."""
        return self.largest is None and not self.is_too_short

    @property
    def is_too_short(self) -> bool:
        """Whether the step took less than the shortest normal share of its prediction.

        A log states the lengths of the rollouts that are trained on. Those that are dropped may be of any length.
        """
        step = next((gap for gap in self.gaps if gap.phase == "step"), None)
        least = max(self.error.low, SHORTEST_NORMAL)
        return step is not None and step.measured_s < least * (step.predicted_s - self._dropped_s)

    @property
    def _dropped_s(self) -> float:
        """Predicted seconds of generating rollouts that are not trained on."""
        workload = self.plan.job.workload
        generated = workload.num_generated_prompts_per_step or workload.num_prompts_per_step
        rollout_s = sum(gap.predicted_s for gap in self.gaps if gap.phase == Phase.ROLLOUT)
        return rollout_s * (1 - workload.num_prompts_per_step / generated)

    @property
    def words(self) -> str:
        """Summary in one sentence."""
        gap = self.largest
        if gap is None and self.is_too_short:
            return f"shorter than predicted: the step takes {self.gaps[0].ratio:.2f} times its prediction"
        if gap is None:
            return "normal: every phase is within the usual prediction error"
        factor = "" if gap.ratio is None else f", {gap.ratio:.1f} times what the hardware needs"
        return f"not normal: {gap.phase} takes {format_seconds(gap.measured_s)}{factor}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on suspicious values: a step that is too short, responses cut at the cap."""
        share, cap = self.measured.lengths.get("cut_share", 0.0), self.plan.job.workload.max_response_len
        remarks = []
        if not self.plan.verdict.may_fit:
            needs = "; ".join(short.needs for short in self.plan.shortages) or "; ".join(self.plan.refusals)
            remarks.append(f"by its prediction the job does not fit where it ran: {needs}")
        if share >= MANY_CUT:
            waits = "every batch waits for the cap, and a reward on the final answer finds none"
            remarks.append(f"{share:.0%} of responses end at the cap of {cap:,} tokens: {waits}")
        if self.is_too_short:
            least = f"below the normal minimum of {max(self.error.low, SHORTEST_NORMAL):.2f} times its prediction"
            remarks.append(f"the step is {least}: did it do less work than the job states?")
        if self.tail_s:
            remarks.append(
                f"log and job have a mean length alone: a tail up to the cap would add {format_seconds(self.tail_s)}, "
                "which counts as normal; workload.response_lengths tells"
            )
        remarks += self._describe_optimizer_steps()
        return tuple(remarks)

    def _describe_optimizer_steps(self) -> list[str]:
        steps, num = self.measured.optimizer_steps, self.plan.asked.workload.num_mini_batches
        if steps is None or (num == 1 and steps.generating_s is None):
            return []
        if steps.generating_s is None:
            return [f"a step of the job is {num} optimizer steps of the log, {format_seconds(steps.mean_s)} each"]
        words = (
            f"1 of {num} optimizer steps generates and takes {format_seconds(steps.generating_s)}; those that train on "
            f"its rollouts take {format_seconds(steps.buffered_s)}"
        )
        if steps.per_generation == num:
            return [words]
        return [words, f"the log generates every {steps.per_generation} optimizer steps, the job every {num}"]

    @property
    def error(self) -> MeasuredError:
        """Usual error of step predictions; for phases see `find_phase_error`."""
        return find_step_error(self.plan)

    @property
    def normal_words(self) -> str:
        """The normal ranges in one sentence."""
        names = dict.fromkeys(f"{gap.phase} up to {gap.longest_normal:.2f} times" for gap in self.gaps)
        return f"normal: {', '.join(names)} the prediction; a step: {self.error.words}"

    def as_json(self) -> dict[str, Any]:
        """JSON without the plan."""
        return {
            "schema_version": STEP_REPORT_SCHEMA_VERSION,
            "stack": self.measured.stack,
            "num_steps": self.measured.num_steps,
            "is_normal": self.is_normal,
            "normal": self.error.as_json(),
            "overrides": list(self.overrides),
            "gaps": [gap.as_json() for gap in self.gaps],
            "largest": self.largest and self.largest.phase,
            "causes": [cause.as_json() for cause in self.causes],
            "remarks": list(self.remarks),
            "lengths": self.measured.lengths,
            "unread": list(self.measured.unread),
        }


def explain_step(asked: JobSpec, measured: MeasuredStep, executed_plan: Plan | None = None) -> StepReport:
    """Compare a measured step with the job's prediction and look for the cause of a gap.

    executed_plan: the plan that ran. It replaces the prediction if the job cannot be planned again, for example because
    its models were moved; then measured lengths are ignored and no causes are searched. Raises: SpecError if the log
    cannot belong to this job, NoFeasiblePlanError if no seconds are predicted for it.
    """
    measured = _gather_optimizer_steps(measured, asked.workload.num_mini_batches)
    overrides = _list_length_overrides(asked, measured.lengths)
    job = override_job(asked, overrides) if overrides else asked
    try:
        plan = open_search(job).run(with_others=False)
    except SpecError:
        if executed_plan is None:
            raise
        plan, overrides = executed_plan, ()
    if plan.timing is None:
        raise _explain_missing_prediction(plan)
    predicted = _sum_by_timer(plan.timing.step, measured)
    tail_s = _predict_tail(job, plan, measured.lengths) if plan is not executed_plan else 0.0
    gaps = tuple(_list_gaps(plan, measured, predicted, tail_s))
    wrong = [gap for gap in gaps if not gap.is_normal and gap.gap_s >= LEAST_SHARE * measured.seconds]
    phases = [gap for gap in wrong if gap.phase != "step"]
    largest = max(phases or wrong, key=lambda gap: gap.gap_s, default=None)
    causes: tuple[Cause, ...] = ()
    if largest is not None and plan is not executed_plan and plan.verdict.may_fit:
        causes = list_causes(job, plan, largest.phase, largest.measured_s)
    return StepReport(plan, overrides, measured, gaps, largest, causes, tail_s)


def _predict_tail(job: JobSpec, plan: Plan, lengths: Mapping[str, float]) -> float:
    """Further seconds of rollouts whose longest response reaches the cap, where log and job have a mean alone; else 0.

    The layout stays. Equal lengths are the shortest rollout of a mean.
    """
    work, mean = job.workload, lengths.get("mean_response_len", 0.0)
    has_tail = lengths.get("longest_response_len") or lengths.get("cut_share")
    if has_tail or not 1 <= mean < work.max_response_len or not isinstance(work.response_lengths, ConstantLengths):
        return 0.0
    cap, num = work.max_response_len, work.num_rollouts_per_step
    widest = fit_lengths(mean, cap, cut_share=None, longest=cap, num_rollouts=num)
    chosen = [f"{key}={value}" for key, value in list_overrides(plan.choice, plan.job, plan.asked).items() if value]
    widest_plan = ask(job, Change((*chosen, widest))).plan
    return 0.0 if widest_plan is None else max(0.0, widest_plan.seconds - plan.seconds)


def _gather_optimizer_steps(measured: MeasuredStep, num: int) -> MeasuredStep:
    """One step of the job from a log of optimizer steps, of which `num` train on the rollouts of one generation."""
    steps = measured.optimizer_steps
    if steps is None or (num == 1 and steps.generating_s is None):
        return measured
    if steps.generating_s is None:
        return replace(measured, step_s=num * steps.mean_s)
    rollout_s = max(0.0, steps.generating_s - steps.buffered_s)
    phases = {Phase.ROLLOUT: rollout_s, Phase.TRAIN: num * min(steps.buffered_s, steps.generating_s)}
    # a generating step differs from the others in all that is not training
    covers = {"train*": Phase.TRAIN, "optimizer*": Phase.TRAIN, "*": Phase.ROLLOUT}
    return replace(measured, step_s=math.fsum(phases.values()), phases=phases, covers=covers)


def _sum_by_timer(timing: StepTiming, measured: MeasuredStep) -> dict[Phase, float]:
    """Sum predicted seconds by timed phase. An action counts for the phase whose timer includes it."""
    seconds: dict[Phase, float] = {}
    for action in timing.actions:
        timers = (phase for pattern, phase in measured.covers.items() if fnmatchcase(action.action_id, pattern))
        phase = next((phase for phase in timers if phase in measured.phases), action.phase)
        seconds[phase] = seconds.get(phase, 0.0) + action.cost.seconds
    return {phase: taken for phase, taken in seconds.items() if taken > 0}


def _list_gaps(plan: Plan, measured: MeasuredStep, predicted: Mapping[Phase, float], tail_s: float) -> list[PhaseGap]:
    high = find_step_error(plan).high
    longest = high * (1 + tail_s / plan.seconds)
    gaps = [] if measured.step_s is None else [PhaseGap("step", measured.step_s, plan.seconds, longest)]
    named = [phase for phase in Phase if phase in measured.phases and (measured.phases[phase] or phase in predicted)]
    gaps += [
        PhaseGap(phase.value, measured.phases[phase], predicted.get(phase, 0.0), find_phase_error(plan, phase).high)
        for phase in named
    ]
    gaps = [
        replace(gap, longest_normal=gap.longest_normal * (1 + tail_s / gap.predicted_s))
        if gap.phase == Phase.ROLLOUT and gap.predicted_s
        else gap
        for gap in gaps
    ]
    # without the step's own time no time is left to assign
    if measured.step_s is not None and measured.phases:
        unassigned_s = measured.step_s - math.fsum(measured.phases.values())
        unnamed = math.fsum(seconds for phase, seconds in predicted.items() if phase not in measured.phases)
        gaps.append(PhaseGap(BETWEEN, max(0.0, unassigned_s), unnamed, high))
    return gaps


def _list_length_overrides(asked: JobSpec, lengths: Mapping[str, float]) -> tuple[str, ...]:
    """Turn measured lengths into overrides. Raises: SpecError if they exceed the job's maximum."""
    work = asked.workload
    for key, longest in (("mean_response_len", "max_response_len"), ("longest_response_len", "max_response_len"),
                         ("mean_prompt_len", "max_prompt_len")):  # fmt: skip
        if lengths.get(key, 0.0) > getattr(work, longest) + 1:
            raise SpecError(
                f"{key} was {lengths[key]:,.0f} tokens, the job allows {getattr(work, longest):,}",
                where=f"workload.{longest}",
                rule="a log must be compared with the job that wrote it",
                way_out=f"workload.{longest}={math.ceil(lengths[key])}, or the job of that log",
            )
    words = []
    if "mean_prompt_len" in lengths:
        words.append(f"workload.mean_prompt_len={max(1, round(lengths['mean_prompt_len']))}")
    mean = lengths.get("mean_response_len", lengths.get("mean_seq_len", 0.0) - work.usual_prompt_len)
    if mean >= 1:
        words.append(f"workload.mean_response_len={min(round(mean), work.max_response_len)}")
        words.append(
            fit_lengths(
                min(mean, work.max_response_len),
                work.max_response_len,
                cut_share=lengths.get("cut_share"),
                longest=lengths.get("longest_response_len"),
                num_rollouts=work.num_rollouts_per_step,
                shape=work.response_lengths,
            )
        )
    return tuple(words)


def _explain_missing_prediction(plan: Plan) -> NoFeasiblePlanError:
    return NoFeasiblePlanError(
        "no seconds are predicted for this job",
        where="the job",
        rule=f"profile '{plan.job.hardware.profile}' has no rates",
        way_out="name the layout that ran (`rlplan plan JOB` lists what makes it fit), or another profile",
    )
