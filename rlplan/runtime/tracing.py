"""Traces: the peak of a real Hugging Face forward and backward pass, found without running it.

In: a `config.json` as a dictionary, tokens, what is recomputed and how the loss is taken. Out: bytes by kind.
The model is built under FakeTensorMode, where tensors have shapes and no memory, and torch's MemTracker follows what
would be allocated. It is the judge of the closed formulas in `rlplan.memory`, and the way out for architectures that
they do not know. Left out: communication, the optimizer, kernels that exist on CUDA only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from rlplan.vocabulary import MemoryKind

CHUNKS = 8
"""Parts into which the chunked loss cuts the tokens. Source: torchtune 0.6 modules/loss/ce_chunked_output_loss.py."""
_ATTENTION = "rlplan_traced"


@dataclass(frozen=True)
class TracedPeak:
    """Bytes at the largest moment of one forward and backward pass.

    parameters: of the model, always there. gradients: those that exist then. rest: activations, logits, temporaries.
    end_of_forward: activations and logits that wait for the backward pass.
    """

    parameters: int
    gradients: int
    rest: int
    end_of_forward: int

    @property
    def num_bytes(self) -> int:
        """The whole peak."""
        return self.parameters + self.gradients + self.rest

    @property
    def rows(self) -> dict[MemoryKind, int]:
        """By kind, as the ledger has them."""
        return {
            MemoryKind.WEIGHTS: self.parameters,
            MemoryKind.GRADIENTS: self.gradients,
            MemoryKind.ACTIVATIONS: self.rest,
        }


def trace_peak(
    config: Mapping[str, Any],
    num_tokens: int,
    *,
    recompute: str = "none",
    loss: str = "plain",
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
) -> TracedPeak:
    """The peak of one micro-batch of `batch` sequences with `num_tokens` tokens in all.

    recompute: `none`, `full` (every decoder layer) or `selective` (every other decoder layer).
    loss: `plain` (logits to fp32, cross-entropy), `chunked` (fp32 a chunk at a time) or `in_place` (rlplan's own).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _register_attention()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            parsed = AutoConfig.for_model(**dict(config))
            parsed._attn_implementation = _ATTENTION
            model = AutoModelForCausalLM.from_config(parsed, attn_implementation=_ATTENTION)
            model.train()
            _recompute(model, recompute)
            tokens = torch.zeros(batch, num_tokens // batch, dtype=torch.long)
            return _track(model, tokens, LOSSES[loss])
    finally:
        torch.set_default_dtype(before)


def _track(model: nn.Module, tokens: torch.Tensor, loss: "Callable[[Any, torch.Tensor], torch.Tensor]") -> TracedPeak:
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        value = loss(model, tokens)
        forward = _totals(tracker.get_tracker_snapshot("current"))
        value.backward()
    peak = _totals(tracker.get_tracker_snapshot("peak"))
    return TracedPeak(
        parameters=peak["Parameter"],
        gradients=peak["Gradient"],
        rest=peak["Total"] - peak["Parameter"] - peak["Gradient"],
        end_of_forward=forward["Total"] - forward["Parameter"] - forward["Gradient"],
    )


def _totals(snapshot: Mapping[Any, Mapping[Any, int]]) -> dict[str, int]:
    """Bytes by MemTracker's categories on the one device there is."""
    totals: dict[str, int] = {}
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            name = getattr(kind, "value", str(kind))
            totals[name] = totals.get(name, 0) + size
    return totals


def _recompute(model: Any, policy: str) -> None:
    if policy == "none":
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if policy == "selective":
        layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        for index, layer in enumerate(max(layers, key=len)):
            layer.gradient_checkpointing = index % 2 == 0


def _body(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of every token, as rows."""
    hidden: torch.Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])


def _plain_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _chunked_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits in the model's type, whole; fp32 only a chunk at a time, in forward and backward."""
    logits = model.get_output_embeddings()(_body(model, tokens))
    parts = zip(logits.chunk(CHUNKS), tokens.reshape(-1).chunk(CHUNKS), strict=True)
    return sum(_chunk_loss(part, targets) for part, targets in parts) / tokens.numel()  # type: ignore[return-value]


def _chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), targets, reduction="sum")


def _in_place_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    from rlplan.runtime.logprob_model import _SelectedLogprobs

    logits = model.get_output_embeddings()(_body(model, tokens)).float()
    logprobs: torch.Tensor = _SelectedLogprobs.apply(logits, tokens.reshape(-1), 1.0)
    return logprobs.mean()


LOSSES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "plain": _plain_loss,
    "chunked": _chunked_loss,
    "in_place": _in_place_loss,
}


def _register_attention() -> None:
    """An attention that never builds a mask, which transformers does as soon as it feels traced."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *arguments, **named: None)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Causal flash attention with grouped keys and values, as CUDA runs it: nothing of T squared, nothing repeated.

    Values narrower than the keys (MLA) are padded, which transformers does for flash attention.
    Queries are laid out token by token, as CUDA's kernel lays out its output.
    """
    if query.stride(1) > query.stride(2):
        query, key = (states.transpose(1, 2).contiguous().transpose(1, 2) for states in (query, key))
    narrower = query.shape[-1] - value.shape[-1]
    if narrower:
        value = nn.functional.pad(value, (0, narrower))
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    if narrower:
        output = output[..., :-narrower]
    return output.transpose(1, 2).contiguous(), None
