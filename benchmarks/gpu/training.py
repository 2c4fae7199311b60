"""Training steps and log-prob passes, measured.

In: a case and a device. Out: what was measured, by name with the unit at its end.
The first step differs from the second (the optimizer's states appear): the second is compared, the
first kept beside it.
Left out: more than one rank, data, a loss that falls.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.cases import Case
from benchmarks.gpu.meters import make_meter
from benchmarks.gpu.models import batch_of, random_tokens, scoring_model, trained_model
from rlplan.runtime.measure.memory_meter import resident_bytes

LEARNING_RATE = 1e-5


def train(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """Two optimizer steps of one micro-batch each."""
    torch.zeros(1, device=device)  # what the device's libraries take of the host is not the case's
    if case.stage is not None:
        import deepspeed  # noqa: F401
    host_before = resident_bytes()
    step = _deepspeed_step(case, device) if case.stage is not None else _torch_step(case, device)
    meter = make_meter(device, used_before)
    with meter:
        step()
        first = meter.peaks()
    started = time.perf_counter()
    with meter:
        step()
        measured = meter.peaks()
        resident = meter.resident()
        if device.type == "cuda":
            torch.cuda.synchronize()
            measured["step_s"] = time.perf_counter() - started
    if case.offload != "none" and device.type == "cpu":  # the host is the device: nothing tells them apart
        return {"device_and_host_bytes": resident}
    if case.offload != "none":
        measured["host_bytes"] = resident_bytes() - host_before
    return measured | {"resident_bytes": resident, "first_allocated_bytes": first["allocated_bytes"]}


def score(case: Case, device: torch.device, used_before: int | None) -> dict[str, float]:
    """One pass without gradient, after one that loads the kernels."""
    model, batch = scoring_model(case, device), batch_of(random_tokens(case, device))
    meter = make_meter(device, used_before)
    with torch.no_grad():
        model(batch)
        with meter:
            resident = meter.resident()
            model(batch)
            measured = meter.peaks()
    return measured | {"resident_bytes": resident}


def _torch_step(case: Case, device: torch.device) -> Callable[[], None]:
    """Plain torch: AdamW in the weights' own type, several tensors at once, gradients dropped after the step."""
    model, tokens = trained_model(case, device), random_tokens(case, device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, foreach=True)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _deepspeed_step(case: Case, device: torch.device) -> Callable[[], None]:
    """A DeepSpeed engine of one rank, with torch's fused AdamW: in place as DeepSpeed's own, without its compiler."""
    import deepspeed

    backend = "nccl" if device.type == "cuda" else "gloo"
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)  # a free port, taken at once
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(store.port)
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    model, tokens = trained_model(case, device), random_tokens(case, device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=deepspeed_config(case))

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


def deepspeed_config(case: Case) -> dict[str, Any]:
    """The config of a case: DeepSpeed's defaults but for what the case says."""
    zero: dict[str, Any] = {"stage": case.stage, "reduce_bucket_size": case.bucket_size}
    if case.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if case.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True, "fused": True}},
        "zero_optimization": zero,
    }
