"""Models with random weights, as the cases train them, and their losses.

In: a case. Out: a module whose forward pass takes token ids and gives the loss. Nothing comes from the network.
Left out: real weights: no byte depends on them.
"""

from typing import Any

import torch
from torch import nn

from benchmarks.gpu.cases import LORA_RANK, Case
from rlplan.runtime.measure.tracing import LOSSES
from rlplan.runtime.models.logprob_model import LogprobModel, TokenBatch
from rlplan.runtime.models.packed_attention import PACKED, register_packed_attention
from rlplan.vocabulary import Role

DTYPE = torch.bfloat16


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


def batch_of(tokens: torch.Tensor) -> TokenBatch:
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
        put_adapters_on(model, LORA_RANK)
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


def put_adapters_on(model: nn.Module, rank: int) -> None:
    """Freeze the model and give every linear layer but the head a LoRA pair."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, Adapter(child, rank))
