"""Likely causes of a slow phase: slow settings, each predicted and compared with the measured time.

In: a job and its plan, a phase and its measured seconds. Out: Causes, the likeliest first. Left out: causes outside the
job's settings (a slow disk, a busy host, a different kernel). If no setting comes close, the list is empty.

Each setting is applied to the chosen layout with everything else fixed, so its seconds come from the same formulas
(0.04 s each, no search). The likeliest cause is the one whose prediction is nearest to the measurement as a ratio.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlplan.planner.answers.changes import Change, ask
from rlplan.planner.answers.plan_results import list_overrides, sum_phase_costs
from rlplan.planner.memo import Memo
from rlplan.planner.plan import Plan
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Phase

MOST_CAUSES = 3
EXPLAINS = 0.5
"""A cause is named only if it leaves at most this share of the log ratio of measured to predicted seconds."""
SEQUENCES = (128, 64, 32, 16, 8)
PASSES = (1, 2, 4, 8)
MEASURED = frozenset({"workload.response_lengths", "workload.mean_prompt_len", "workload.mean_response_len"})
"""Keys that a log decides, whatever the job says."""
Settings = dict[str, str]


@dataclass(frozen=True)
class Cause:
    """A setting that would make the phase as slow as measured."""

    words: str
    """The setting in the words of the measured framework."""
    overrides: str
    """Overrides that lead to the slow prediction."""
    predicted_s: float
    """Predicted seconds of the phase with the setting."""
    left: float
    """Ratio of measured to predicted seconds; 1 explains the phase completely."""

    def as_json(self) -> dict[str, Any]:
        """JSON for other tools."""
        return asdict(self)


def list_causes(job: JobSpec, plan: Plan, phase: str, measured_s: float) -> tuple[Cause, ...]:
    """List settings that would explain a phase's seconds (`step`: the whole step); empty if nothing comes close."""
    now = _predict_seconds(plan, phase)
    if not now:
        return ()
    chosen = list_overrides(plan.choice, plan.job, plan.asked)
    causes, memo = [], Memo()
    for words, settings in _list_hypotheses(job, plan, phase):
        if any(_is_set(job, key) for key in settings.keys() - MEASURED):
            continue  # the job says that it ran otherwise
        typed = tuple(f"{key}={value}" for key, value in {**chosen, **settings}.items() if value)
        outcome = ask(job, Change(typed), memo=memo)
        is_possible = outcome.plan is not None and (outcome.may_fit or phase not in (Phase.ROLLOUT, "step"))
        seconds = _predict_seconds(outcome.plan, phase) if is_possible and outcome.plan else 0.0
        if seconds and seconds > now:
            shown = " ".join(f"{key}={_quote_value(value)}" for key, value in settings.items() if value)
            causes.append(Cause(words, shown, seconds, measured_s / seconds))
    bar = EXPLAINS * abs(math.log(measured_s / now))
    near = [cause for cause in causes if abs(math.log(cause.left)) <= bar]
    kinds: dict[str, Cause] = {}
    for cause in sorted(near, key=lambda cause: abs(math.log(cause.left))):
        kinds.setdefault(cause.words.partition(":")[0], cause)
    return tuple(kinds.values())[:MOST_CAUSES]


def _is_set(job: JobSpec, key: str) -> bool:
    """Whether the job itself decides a key, such as `training.zero_stage`."""
    part, _, name = key.partition(".")
    spec = getattr(job, part)
    return name in spec.model_fields_set and getattr(spec, name) not in ("auto", None)


def _quote_value(value: str) -> str:
    return f"'{value}'" if " " in value else value


def _predict_seconds(plan: Plan, phase: str) -> float:
    if plan.timing is None:
        return 0.0
    if phase == "step":
        return plan.seconds
    return next(
        (cost.seconds for timed, cost in sum_phase_costs(plan.timing.step).items() if timed.value == phase), 0.0
    )


def _list_hypotheses(job: JobSpec, plan: Plan, phase: str) -> Iterator[tuple[str, Settings]]:
    """List (description, overrides) of settings that slow a phase."""
    is_all = phase == "step"
    if is_all or phase in (Phase.TRAIN, Phase.SCORE):
        yield from _list_slow_passes(job, plan)
    if is_all or phase == Phase.TRAIN:
        yield from _list_slow_training(plan)
    if is_all or phase == Phase.ROLLOUT:
        yield from _list_slow_rollouts(job, plan)
    if is_all or phase in (Phase.SYNC, Phase.SWITCH):
        yield from _list_slow_transfers(plan)


def _list_slow_passes(job: JobSpec, plan: Plan) -> Iterator[tuple[str, Settings]]:
    """Padding, and micro-batches too small to fill the GPU."""
    work, tokens = job.workload, "training.max_tokens_per_micro_batch"
    padded = {
        "workload.response_lengths": "{kind: constant}",
        "workload.mean_prompt_len": str(work.max_prompt_len),
        "workload.mean_response_len": str(work.max_response_len),
    }
    if _is_set(job, tokens):
        return  # a token budget packs sequences
    yield "packing off: every sequence is padded to the longest allowed (verl: use_remove_padding=False)", padded
    if plan.is_on_host:
        return
    size = "workload.micro_batch_size_per_gpu"
    if not job.is_for_rlplan:
        for count in PASSES:
            words = f"padded micro-batches: {count} sequences, padded to the longest (verl: use_dynamic_bsz=False)"
            yield words, {tokens: "", size: str(count)}
    if plan.choice.trainer.max_tokens > work.max_seq_len:
        words = "token budget too small: one longest sequence per micro-batch (verl: ppo_max_token_len_per_gpu)"
        yield words, {tokens: str(work.max_seq_len)}


def _list_slow_training(plan: Plan) -> Iterator[tuple[str, Settings]]:
    trainer = plan.choice.trainer
    recomputes = {"training.gradient_checkpointing": "true"}
    if not trainer.gradient_checkpointing:
        yield "recomputation: gradient checkpointing is on, although memory suffices without it", recomputes
    if not trainer.offloads_optimizer:
        offloads = {"training.offloads_optimizer": "true", "training.zero_stage": str(max(2, trainer.zero_stage))}
        yield "optimizer on the host: states are copied at every step (verl: optimizer_offload=True)", offloads
        yield "optimizer on the host: with recomputation", offloads | recomputes
    if not trainer.offloads_parameters:
        everything = {"training.offloads_optimizer": "true", "training.offloads_parameters": "true"}
        words = "parameters on the host: weights are copied for every micro-batch (verl: param_offload=True)"
        yield words, everything | {"training.zero_stage": "3"}
        yield words + ", with recomputation", everything | {"training.zero_stage": "3"} | recomputes


def _list_slow_rollouts(job: JobSpec, plan: Plan) -> Iterator[tuple[str, Settings]]:
    engine = plan.choice.engine
    if plan.is_on_host:
        return
    yield "no CUDA graphs: the engine runs eagerly (enforce_eager=True)", {"rollout.has_cuda_graphs": "false"}
    for count in SEQUENCES:
        if count < engine.max_num_seqs:
            words = f"too few sequences at once: max_num_seqs, or a KV cache for {count} (gpu_memory_utilization)"
            yield words, {"rollout.max_num_seqs": str(count)}
    if plan.kv is not None:
        for part in (2, 4, 8, 16):
            size = max(plan.kv.least_bytes, plan.kv.kv_cache_memory_bytes // part)
            words = "KV cache too small: sequences are preempted (gpu_memory_utilization)"
            yield words, {"rollout.kv_cache_memory": str(size)}
    for tp in (1, 2, 4, 8):
        if tp != engine.tp:
            yield f"another tensor parallelism: engines with {tp} GPUs", {"rollout.tp": str(tp)}
    if engine.quantization:
        yield f"unquantized weights: the plan uses {engine.quantization}", {"rollout.quantization": "none"}
    if plan.job.rollout.base_path is not None:
        yield "unquantized weights: the plan uses a 4-bit base", {"rollout.base_path": "null"}


def _list_slow_transfers(plan: Plan) -> Iterator[tuple[str, Settings]]:
    if plan.choice.sync_mode not in ("disk", ""):
        yield "slow weight transfer: through files instead of links", {"placement.transport": "disk"}
    if plan.choice.arrangement.shares_devices and not plan.is_on_host:
        everything = {"placement.offload": "host", "placement.offload_roles": "all"}
        yield "slow weight transfer: all idle roles move to the host and back", everything
