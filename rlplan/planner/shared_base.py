"""Conditions for sharing one frozen base between trainer and engine (`rollout.shares_base`).

In: a job and a choice. Out: reasons against it, which rules.py includes. Left out: whether memory suffices, and checks
that need both sides: the engine compares each weight while loading (runtime/workers/engine/base_loading.py).
"""

from collections.abc import Iterator

from rlplan.dataflow.choice import Choice
from rlplan.errors import SpecError
from rlplan.memory.serving.shared_base import find_unshareable_part
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import Placement

KEY = "rollout.shares_base"


def find_shared_base_refusals(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Reasons why a choice cannot share the base; none if the job does not ask for it."""
    if job.rollout.shares_base:
        yield from (f"{KEY}: {reason}" for reason in _check_job(job))
        yield from (f"{KEY}: {reason}" for reason in _check_choice(choice))
        if reason := find_shared_stage_refusal(job, choice):
            yield reason


def find_shared_stage_refusal(job: SettledJob, choice: Choice) -> str:
    """The reason why the trainer's ZeRO stage prevents sharing; empty if it does not."""
    cuts = choice.trainer.zero_stage == 3 or choice.trainer.offloads_parameters
    is_refused = job.rollout.shares_base and cuts
    return f"{KEY}: ZeRO-3 shards the base (training.zero_stage 0 to 2)" if is_refused else ""


def _check_job(job: SettledJob) -> Iterator[str]:
    training, rollout = job.training, job.rollout
    if training.lora is None:
        yield "without training.lora the trainer changes the base while the engine generates with it"
    if not job.has_engine:
        yield f"{job.algorithm.name} has no engine"
    if training.has_packed_base:
        yield "training.lora.base_dtype nf4: the engine has no kernel for the trainer's 4-bit format"
    if training.dtype is not rollout.dtype:
        yield f"the trainer's base is in {training.dtype.value}, the engine's in {rollout.dtype.value}"
    if job.takes_images:
        yield "data.image_column: the tower's weights are not shared"
    try:
        has = find_unshareable_part(job.load_model())
    except SpecError:
        return  # the check that reads the model reports the error
    if has:
        yield f"the policy has {has}, which vLLM stores in another layout than the trainer"


def _check_choice(choice: Choice) -> Iterator[str]:
    trainer, engine, placement = choice.trainer, choice.engine, choice.arrangement.placement
    if choice.sync_mode and choice.sync_mode != "adapter":
        yield "full weights would overwrite the base (placement.sync_content=adapter)"
    if placement is Placement.COLOCATED:
        yield "a colocated engine drops its weights between phases (placement.placement=hybrid)"
    elif placement is Placement.DISAGGREGATED:
        yield "trainer and engine are on separate devices (placement.placement=hybrid)"
    if trainer.tp > 1 or engine.ranks > 1:
        yield "tensor-parallel ranks hold only parts of the base (training.tp=1, rollout.tp=1)"
    if engine.quantization not in (None, "none"):
        yield f"rollout.quantization {engine.quantization}: the trainer's base is not quantized"
