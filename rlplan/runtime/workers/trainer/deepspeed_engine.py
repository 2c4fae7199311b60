"""Creation of a role's DeepSpeed engine, and operations on it that work around DeepSpeed's behaviour.

In: the bundle's DeepSpeed configuration, a rank, a model. Out: an engine. Left out: losses and scores.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from rlplan.emit.deepspeed import EIGHT_BIT
from rlplan.errors import HostError
from rlplan.runtime.device.cuda import CudaDevice
from rlplan.runtime.learning.packing import pack_best_fit
from rlplan.runtime.models.logprob_model import Score, TokenBatch, make_batch, read_teacher, score_packed
from rlplan.runtime.models.tensor_parallel import compute_gradient_norm, disable_input_check
from rlplan.runtime.rollout.experience import SequencePair, TeacherTokens
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Dtype

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


def import_deepspeed() -> None:
    """Import DeepSpeed and its lazy dependencies, so that their memory can be measured before a model is loaded."""
    import deepspeed

    importlib.import_module("torch._inductor.compile_fx")  # deepspeed.initialize imports it even without compilation
    # Disable the shared-memory all-reduce, which ZeRO never calls. It takes 66 MiB of /dev/shm per rank, leaves files
    # there, and is compiled at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join_ranks(
    rank: int,
    world_size: int,
    address: tuple[str, int],
    timeout_s: float,
    listener: int | None = None,
    device: CudaDevice | None = None,
) -> None:
    """Join the process group, once per process: over gloo, on GPUs also over NCCL (not yet run on a GPU).

    listener: rank 0's open socket, bound to one interface. device: None on a CPU host. A process sees only its own GPU,
    so the local rank on GPUs is 0.
    """
    import deepspeed
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank) if device is None else "0",
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
    )
    backend = device.collectives if device else "gloo"
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    # DeepSpeed adopts torch's group where one exists, so no second group is created (comm/comm.py).
    deepspeed.init_distributed(dist_backend="nccl" if "nccl" in backend else "gloo", verbose=False)


def build_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """Create a DeepSpeed engine that trains all trainable parameters of a model.

    Raises: HostError for fp16 on a device where DeepSpeed does not support it.
    """
    import deepspeed

    if "fp16" in config and not deepspeed.get_accelerator().is_fp16_supported():
        raise HostError(
            "DeepSpeed does not train in float16 on this host",
            where="training.dtype",
            rule="a GPU, or a CPU with float16 matrix units",
            way_out="training.dtype=bfloat16 or float32",
        )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None
    if config["optimizer"]["type"] == EIGHT_BIT:
        from bitsandbytes.optim import AdamW8bit

        optimizer = AdamW8bit(trainable, **config["optimizer"]["params"])
        # DeepSpeed gets the optimizer itself, so its configuration must not name one.
        config = {key: value for key, value in config.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=config)
    disable_input_check(engine)
    undo_initial_step(engine)
    return engine


def undo_initial_step(engine: Any) -> None:
    """Undo DeepSpeed's initial, empty optimizer step in 16-bit training without ZeRO.

    DeepSpeed 0.19.8 allocates the moments with a step of zero gradients (fp16/unfused_optimizer.py). Adam counts that
    step, so its bias correction made the first real step 26 % too short. The step also applied weight decay to the
    master weights. ZeRO's optimizers take no such step, and fp32 training without ZeRO uses torch's own optimizer.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    for masters, weights in zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def shard_frozen(model: nn.Module, config: dict[str, Any]) -> Any:
    """Shard a frozen model with DeepSpeed's ZeRO-3: each rank keeps its shard of the weights."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def recompute_layers(language_model: Any) -> None:
    """Enable gradient checkpointing: keep only each decoder layer's input and recompute the layer in the backward pass.

    transformers recomputes in training mode only. Training mode would also enable dropout, so its rate is set to 0.
    """
    language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in language_model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    language_model.train()


def max_over_ranks(count: int) -> int:
    """Maximum of a number over all ranks. Under ZeRO-3 every rank must run as many passes as the busiest one."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return count
    largest = torch.tensor(count)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum a CPU tensor over all ranks, in place.

    Ranks that compute a pass together (Ulysses) each contribute the numbers of the full pass.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def score_in_lock_step(
    pairs: Sequence[SequencePair],
    max_tokens: int,
    judge: Callable[[TokenBatch], torch.Tensor],
    convert: Callable[[torch.Tensor], Score],
) -> list[Score]:
    """Score the response tokens of this rank's pairs. convert: makes a pair's result out of its tensor of scores.

    All ranks of the group run the same number of passes, because ZeRO-3 gathers weights in each pass.
    """
    scores = score_packed(pairs, max_tokens, judge, convert)
    count = len(pack_best_fit([pair.num_tokens for pair in pairs], max_tokens))
    for _ in range(max_over_ranks(count) - count):
        judge(make_batch([]))  # an empty pass that only takes part in the gathers
    return scores


def score_teacher(pairs: Sequence[SequencePair], job: ResolvedJob, model: Any) -> list[TeacherTokens]:
    """Compute the teacher's distributions at this rank's response tokens (`algorithm.teacher_top_k`). Collective."""
    vocab_size = model.language_model.config.vocab_size
    top_k = job.algorithm.count_teacher_tokens(vocab_size)
    return score_in_lock_step(
        pairs,
        job.max_tokens_per_micro_batch,
        lambda batch: model(batch, top_k)[0],
        lambda part: read_teacher(part, vocab_size if top_k == vocab_size else 0),
    )


def find_missing_loss_scale(engine: Any) -> float:
    """Factor by which a loss must be multiplied before DeepSpeed's backward pass; 1 except in fp16 without ZeRO.

    DeepSpeed 0.19.8 scales the loss only for ZeRO's optimizers, but divides gradients by the scale in stage 0 too
    (fp16/unfused_optimizer.py). The norm that it reports is then the scaled gradient's.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return 1.0
    scaling = engine.optimizer.loss_scale_config
    return float(scaling.cur_scale) if scaling.use_grad_scaling else 1.0


def step_and_measure_norm(engine: Any, take_step: Callable[[], Any]) -> float:
    """Take a step and return the gradient norm over all ranks before clipping; NaN if an overflow skipped the step."""
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        scale = find_missing_loss_scale(engine)
        take_step()
        norm = engine.get_global_grad_norm()
        return float(norm) / scale if norm is not None else 0.0
    # Stage 0 in fp32 is plain torch: DeepSpeed clips without reporting the norm.
    norms: list[float] = []
    clip = engine.clip_fp32_gradients

    def measure_and_clip() -> None:
        parameters = list(engine.module.parameters())
        if engine.autotp_size() > 1:
            norms.append(compute_gradient_norm(parameters))
        else:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))
        clip()

    engine.clip_fp32_gradients = measure_and_clip
    try:
        take_step()
    finally:
        del engine.clip_fp32_gradients
    return norms[0] if norms else 0.0
