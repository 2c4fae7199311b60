"""Training steps and log-prob passes, measured, on models with random weights.

In: a case and a device. Out: what was measured, by name with the unit at its end.
The first step differs from the second (the optimizer's states appear): the second is compared, the
first kept beside it.
Left out: more than one rank, data, a loss that falls, real weights (no byte depends on them).
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.cases import LORA_RANK, Case
from benchmarks.gpu.meters import make_meter
from rlplan.runtime.measure.memory_meter import resident_bytes
from rlplan.runtime.measure.tracing import LOSSES
from rlplan.runtime.models.logprob_model import LogprobModel, TokenBatch
from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention
from rlplan.vocabulary import Role

LEARNING_RATE = 1e-5
DTYPE = torch.bfloat16


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
    model, batch = scoring_model(case, device), make_batch(random_tokens(case, device))
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


class Adapter(nn.Module):
    """A frozen linear layer with a LoRA pair beside it, in the layer's own type and without dropout."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        placed = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, **placed)
        self.lora_b = nn.Linear(rank, base.out_features, **placed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer and its adapter."""
        return self.base(inputs) + self.lora_b(self.lora_a(inputs))


class TrainedModel(nn.Module):
    """A causal language model and one of the losses of the cases, so that torch and DeepSpeed run the same."""

    def __init__(self, language_model: nn.Module, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.language_model = language_model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss over a sequence [1, tokens]."""
        return LOSSES[self.loss](self.language_model, tokens)


class ValueModel(nn.Module):
    """A backbone with one value a token."""

    def __init__(self, backbone: nn.Module, hidden: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Values [1, tokens]."""
        hidden = self.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return self.score(hidden).squeeze(-1)


def make_batch(tokens: torch.Tensor) -> TokenBatch:
    """One sequence whose first token is the prompt: every other one has a log-prob."""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    lens, num_targets = (len(places),), len(places) - 1
    return TokenBatch(tokens, places.unsqueeze(0), lens, places[:-1], tokens.reshape(-1)[1:], (num_targets,))


def random_tokens(case: Case, device: torch.device) -> torch.Tensor:
    """Token ids [1, num_tokens]."""
    return torch.randint(0, case.config["vocab_size"], (1, case.num_tokens), device=device)


def language_model(case: Case, device: torch.device, *, is_backbone: bool = False, attention: str = "sdpa") -> Any:
    """The transformers model, made on the device in bf16: no second copy ever exists."""
    import transformers

    model_class = getattr(transformers, case.config["architectures"][0])
    config = model_class.config_class(**case.config)
    if is_backbone:
        model_class = transformers.AutoModel
    torch.set_default_dtype(DTYPE)
    try:
        with device:
            if is_backbone:
                return ValueModel(model_class.from_config(config, attn_implementation="sdpa"), config.hidden_size)
            return model_class._from_config(config, attn_implementation=attention)
    finally:
        torch.set_default_dtype(torch.float32)


def trained_model(case: Case, device: torch.device) -> TrainedModel:
    """The model of a training case: adapters and recomputation are put on."""
    model = language_model(case, device)
    if case.method == "lora":
        add_adapters(model, LORA_RANK)
    if case.recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return TrainedModel(model, case.loss)


def scoring_model(case: Case, device: torch.device) -> nn.Module:
    """The model of a pass without gradient; the policy's takes the entropy too."""
    role = Role(case.action.removeprefix("score-"))
    if role is Role.VALUE:
        return language_model(case, device, is_backbone=True).eval()
    register_packed_attention()
    model = language_model(case, device, attention=PACKED)
    return LogprobModel(model, 1.0, entropies="seen" if role is Role.POLICY else "none").eval()


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze the model and give every linear layer but the head a LoRA pair."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, Adapter(child, rank))
