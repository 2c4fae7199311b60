"""The DeepSpeed engine of a trained role: its ranks meet, the model is loaded, DeepSpeed takes it over.

In: the bundle's DeepSpeed config, a rank, a model folder. Out: an engine. Left out: what is computed with it.
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
from rlplan.runtime.device.layer import Device
from rlplan.runtime.learning.packing import pack_best_fit
from rlplan.runtime.models.logprob_model import TokenBatch, make_batch, score_packed
from rlplan.runtime.models.tensor_parallel import forget_input_check, norm_of_parts
from rlplan.runtime.rollout.experience import SequencePair
from rlplan.vocabulary import Dtype

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


def import_deepspeed() -> None:
    """DeepSpeed and what it loads lazily, so that its memory can be measured before there is a model.

    Its shared-memory all-reduce is switched off: ZeRO never calls it, and it costs 66 MiB of /dev/shm a rank, leaves
    its files there, and is compiled on the first start.
    """
    import deepspeed

    importlib.import_module("torch._inductor.compile_fx")  # deepspeed.initialize imports it, whether or not it compiles
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join_ranks(
    rank: int,
    world_size: int,
    address: tuple[str, int],
    timeout_s: float,
    listener: int | None = None,
    device: Device | None = None,
) -> None:
    """Meet the other ranks, once in a process: over gloo, on GPUs over NCCL beside it (not yet run on a GPU).

    listener: rank 0's open socket, on one interface only. device: None on a CPU host; a process sees its own GPU alone,
    so that is number 0.
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
    deepspeed.init_distributed(dist_backend="nccl" if "nccl" in backend else "gloo", verbose=False)


def build_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a model, all trainable parameters of which are trained.

    Raises: HostError for fp16 where DeepSpeed does not know it.
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
        config = {key: value for key, value in config.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, optimizer=optimizer, config=config)
    forget_input_check(engine)
    undo_initial_step(engine)
    return engine


def undo_initial_step(engine: Any) -> None:
    """Reset what DeepSpeed's first, empty optimizer step has left in 16 bits without ZeRO.

    DeepSpeed 0.19.8 allocates the moments by a step of zero gradients (fp16/unfused_optimizer.py). Adam counts it, so
    that its bias correction made the first real step 26 % too short; weight decay moved the master weights. ZeRO's
    optimizers take no such step, and in fp32 the optimizer is torch's own.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    for masters, weights in zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight.data)


def share_frozen(model: nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's ZeRO-3 around a model that is not trained: each rank keeps its share of the weights."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def recompute_layers(language_model: Any) -> None:
    """Keep each decoder layer's input alone and compute the layer anew in the backward pass.

    transformers does so in training mode only, so dropout, which training mode would bring back, is set to nothing.
    """
    language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in language_model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    language_model.train()


def largest_count(count: int) -> int:
    """The largest of a number over all ranks: under ZeRO-3 each takes part in every pass."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return count
    largest = torch.tensor(count)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """A CPU tensor added up over all ranks. Ranks that share a pass each add the numbers of the whole pass."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def score_together(
    pairs: Sequence[SequencePair], max_tokens: int, judge: Callable[[TokenBatch], torch.Tensor]
) -> list[tuple[float, ...]]:
    """Numbers of each response's tokens, of this rank's own pairs.

    As many passes on every rank that this one has met, for ZeRO-3 gathers in each.
    """
    judged = score_packed(pairs, max_tokens, judge)
    count = len(pack_best_fit([pair.num_tokens for pair in pairs], max_tokens))
    for _ in range(largest_count(count) - count):
        judge(make_batch([]))
    return judged


def missing_loss_scale(engine: Any) -> float:
    """What a loss has to be multiplied by before DeepSpeed's backward pass; 1 nearly always.

    DeepSpeed 0.19.8 scales the loss for ZeRO's optimizers alone, and divides by the scale in stage 0 all the same
    (fp16/unfused_optimizer.py); the norm that it then tells is that of the scaled gradient.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return 1.0
    scaling = engine.optimizer.loss_scale_config
    return float(scaling.cur_scale) if scaling.use_grad_scaling else 1.0


def global_norm(engine: Any, take_step: Callable[[], Any]) -> float:
    """Take a step; the gradient's norm over all ranks before clipping. NaN where an overflow skipped the step."""
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        scale = missing_loss_scale(engine)
        take_step()
        norm = engine.get_global_grad_norm()
        return float(norm) / scale if norm is not None else 0.0
    # Stage 0 in fp32 is plain torch: DeepSpeed clips without saying what the norm was.
    norms: list[float] = []
    clip = engine.clip_fp32_gradients

    def watched() -> None:
        parameters = list(engine.module.parameters())
        if engine.autotp_size() > 1:
            norms.append(norm_of_parts(parameters))
        else:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))
        clip()

    engine.clip_fp32_gradients = watched
    try:
        take_step()
    finally:
        del engine.clip_fp32_gradients
    return norms[0] if norms else 0.0
