"""Conditions for an engine's base model of its own (`rollout.base_path`, `rollout.quantization mxfp4`), and for one
that trainer and engine share (`rollout.shares_base`).

In: a job, a choice. Out: reasons against it, which rules.py includes. Left out: bytes and shapes
(memory/model/engine_base.py), and checks that need both sides: the engine compares each shared weight while loading
(runtime/workers/engine/base_loading.py). A 4-bit base stays as loaded; only adapters change what the engine samples.
"""

from collections.abc import Iterator

from rlplan.dataflow.choice import Choice
from rlplan.errors import SpecError
from rlplan.memory.model.engine_base import (
    KEY,
    find_base_mismatch,
    find_unshareable_part,
    list_packed_tensors,
    read_base_quantization,
)
from rlplan.memory.model.quantization import Quantization
from rlplan.spec.model import ModelSpec
from rlplan.spec.models.catalogue import resolve_model
from rlplan.spec.resolved import SettledJob
from rlplan.vocabulary import Dtype, Placement, SyncContent

MXFP4 = "mxfp4"
MXFP4_COLUMNS = 32
"""Weights per row that share a scale. Source: vLLM 0.32.0, quantization/online/mxfp4.py, `create_weights`."""
CPU_MULTIPLE = 32
"""Rows and columns must be multiples of this. Source: vLLM 0.32.0, kernels/linear/mixed_precision/cpu.py,
`can_implement`."""
WHOLE_WEIGHTS = "full weights would overwrite the 4-bit base"
_ADAPTERS = "training.lora={rank: 16} placement.sync_content=adapter"


def find_engine_base_refusals(job: SettledJob) -> Iterator[str]:
    """Reasons why no choice of a job supports a 4-bit base; none if the job does not ask for it."""
    if key := find_base_key(job):
        yield from (f"{key}: {reason}" for reason in _check_job(job))
        yield from (f"{key}: {reason}" for reason in _check_models(job))


def find_engine_base_choice_refusals(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Reasons why a choice does not support a 4-bit base."""
    key = find_base_key(job)
    if not key or not choice.sync_mode:
        return
    if choice.sync_mode != "adapter":
        yield f"{key}: {WHOLE_WEIGHTS} (placement.sync_content=adapter)"
    on_a_host = job.device_kind == "cpu"
    if on_a_host and choice.arrangement.placement is Placement.COLOCATED:
        yield f"{key}: a colocated engine on a CPU host restarts from trained weights (placement.placement=hybrid)"
    if on_a_host and choice.engine.tp > 1:
        yield f"{key}: on a CPU, engines with several ranks are untested with 4-bit weights (rollout.tp=1)"
    elif (reason := _check_groups(job, choice.engine.tp)) and not on_a_host:
        yield f"{key}: {reason}"


def find_base_key(job: SettledJob) -> str:
    """Find the key that asks for a 4-bit base; empty if there is none."""
    if job.rollout.base_path is not None:
        return KEY
    return f"rollout.quantization {MXFP4}" if job.rollout.quantization == MXFP4 else ""


def _check_job(job: SettledJob) -> Iterator[str]:
    rollout = job.rollout
    if not job.has_engine:
        yield f"{job.algorithm.name} has no engine ({KEY}=null)"
    if job.training.lora is None:
        yield f"without training.lora engines load the trained weights, which are not in 4 bits ({_ADAPTERS})"
    elif job.placement.sync_content not in ("auto", SyncContent.ADAPTER):
        yield f"{WHOLE_WEIGHTS} (placement.sync_content=adapter)"
    if rollout.base_path is not None and rollout.quantization not in ("none", "auto"):
        yield f"its weights are already quantized, and rollout.quantization is {rollout.quantization} (none)"
    if rollout.shares_base:
        yield "rollout.shares_base: the trainer's base is not quantized (rollout.shares_base=false)"
    if job.takes_images:
        yield "data.image_column: 4-bit vision towers are untested"
    if job.policy.init == "random":
        yield "policy.init random: random weights have no 4-bit checkpoint (policy.init=checkpoint)"
    if rollout.dtype is Dtype.FLOAT32:
        yield "rollout.dtype float32: vLLM's 4-bit kernels compute in 16 bits (rollout.dtype=bfloat16)"


def _check_models(job: SettledJob) -> Iterator[str]:
    """Check the policy's family, and that the folder holds the policy in 4 bits."""
    try:
        model = job.load_model()
    except SpecError:
        return  # the check that reads the model reports the error
    if has := find_unshareable_part(model):
        yield f"the policy has {has}, which are untested in 4 bits"
        return
    base = job.rollout.base_path
    if base is None:
        return
    try:
        if reason := find_base_mismatch(model, job.policy.path, base):
            yield f"{base} is not the policy in 4 bits: {reason}"
        elif job.device_kind == "cpu":
            yield from _check_cpu_kernel(model, read_base_quantization(base))
        if resolve_model(base, where=KEY).vision is not None:
            yield "a vision-language model"
    except SpecError as error:
        yield f"{error.what} ({error.rule})"


def _check_cpu_kernel(model: ModelSpec, scheme: Quantization) -> Iterator[str]:
    """Check shapes against vLLM's CPU kernel."""
    for tensor in list_packed_tensors(model, scheme):
        rows, columns = tensor.shape
        if rows % CPU_MULTIPLE or columns % CPU_MULTIPLE:
            yield f"{tensor.name} is {rows} x {columns}: on a CPU both must divide by {CPU_MULTIPLE}"
            return


def _check_groups(job: SettledJob, tp: int) -> str:
    """The reason why ranks cannot split the columns of a weight; empty if they can."""
    try:
        model = job.load_model()
        size = MXFP4_COLUMNS if job.rollout.base_path is None else _count_group_columns(job.rollout.base_path)
    except SpecError:
        return ""
    widths = {model.num_heads * model.head_dim, model.intermediate_size}
    wrong = next((width for width in sorted(widths) if width % (tp * size)), None)
    return f"rollout.tp {tp} would split groups of {size} columns of {wrong}" if wrong else ""


def _count_group_columns(path: str) -> int:
    """Columns that share a scale; 1 if a whole row has one scale and may be split anywhere."""
    return read_base_quantization(path).form.block[1] or 1


SHARES_BASE = "rollout.shares_base"


def find_shared_base_refusals(job: SettledJob, choice: Choice) -> Iterator[str]:
    """Reasons why a choice cannot share the base; none if the job does not ask for it."""
    if job.rollout.shares_base:
        yield from (f"{SHARES_BASE}: {reason}" for reason in _check_shared_job(job))
        yield from (f"{SHARES_BASE}: {reason}" for reason in _check_shared_choice(choice))
        if reason := find_shared_stage_refusal(job, choice):
            yield reason


def find_shared_stage_refusal(job: SettledJob, choice: Choice) -> str:
    """The reason why the trainer's ZeRO stage prevents sharing; empty if it does not."""
    cuts = choice.trainer.zero_stage == 3 or choice.trainer.offloads_parameters
    is_refused = job.rollout.shares_base and cuts
    return f"{SHARES_BASE}: ZeRO-3 shards the base (training.zero_stage 0 to 2)" if is_refused else ""


def _check_shared_job(job: SettledJob) -> Iterator[str]:
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


def _check_shared_choice(choice: Choice) -> Iterator[str]:
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
