"""The DeepSpeed engine of a trained role: its ranks meet, the model is loaded, DeepSpeed takes it over.

In: the bundle's DeepSpeed config, a rank, a model folder. Out: an engine. Left out: what is computed with it.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from rlplan.emit.deepspeed import EIGHT_BIT
from rlplan.errors import HostError
from rlplan.vocabulary import Dtype

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


def join_ranks(
    rank: int, world_size: int, address: str, port: int, timeout_s: float, listener: int | None = None
) -> None:
    """Meet the other ranks over gloo, once in a process. listener: rank 0's open socket, on one interface only."""
    import deepspeed
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


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
    return engine


def offload_to_host(engine: Any) -> None:
    """Move an engine's states from its GPU to pinned memory. Not yet run on a GPU."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    engine.offload_states(device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False)
    torch.cuda.empty_cache()


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


def global_norm(engine: Any, take_step: Callable[[], Any]) -> float:
    """Take a step; the gradient's norm over all ranks before clipping. NaN where an overflow skipped the step."""
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        take_step()
        norm = engine.get_global_grad_norm()
        return float(norm) if norm is not None else 0.0
    # Stage 0 in fp32 is plain torch: DeepSpeed clips without saying what the norm was.
    norms: list[float] = []
    clip = engine.clip_fp32_gradients

    def watched() -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])))
        clip()

    engine.clip_fp32_gradients = watched
    try:
        take_step()
    finally:
        del engine.clip_fp32_gradients
    return norms[0] if norms else 0.0
