"""Traces: the peak memory of a real Hugging Face forward and backward pass, without running it.

The model is built under FakeTensorMode, where tensors have shapes but no memory; torch's MemTracker records what would
be allocated. Traces check the formulas of `rlplan.memory`, and serve architectures without formulas.
In: a `config.json` as a dictionary, tokens, the recomputation and the loss. Out: bytes by kind.
Left out: communication, the optimizer, kernels that exist on CUDA only.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplan.errors import SpecError
from rlplan.memory.model.logits import ROWS_ON_GPU, rows_on_cpu
from rlplan.runtime.measure.trace_kernels import ATTENTION, fused_attention, replace_kernels
from rlplan.runtime.models.logprob_model import HeadLogprobs
from rlplan.spec.base import shorten_value

CHUNKS = 8
"""Parts into which the chunked loss cuts the tokens. Source: torchtune 0.6 modules/loss/ce_chunked_output_loss.py."""
LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]
_NEVER_READ = ("auto_map", "trust_remote_code", "quantization_config", "_name_or_path", "torch_dtype", "dtype")
"""Keys of a config that name code, files or storage formats, none of which a trace may load."""
_HEADED = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True)
class TracedPeak:
    """Bytes at the peak of one forward and backward pass."""

    parameters: int
    """Bytes of the model's weights."""

    gradients: int
    rest: int
    """Activations, logits, temporaries."""

    end_of_forward: int
    """Bytes of activations and logits that are saved for the backward pass."""

    @property
    def num_bytes(self) -> int:
        return self.parameters + self.gradients + self.rest


def trace_peak(
    config: Mapping[str, Any],
    num_tokens: int,
    *,
    recompute: str = "none",
    loss: str = "plain",
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    has_gradient: bool = True,
) -> TracedPeak:
    """Trace the peak of one micro-batch of `batch` text sequences with `num_tokens` tokens in total.

    config: a parsed `config.json`; code that it names is never loaded, and nothing is downloaded.
    recompute: `none`, `full` (every decoder layer) or `selective` (every other decoder layer).
    loss: `plain` (logits in fp32, cross-entropy), `chunked` (one chunk in fp32 at a time), `in_place` (the gradient
    overwrites the logits), `by_rows` (the runtime's own row-chunked loss) or `none` (a value head).
    has_gradient: False for a pass that only scores.
    Raises: SpecError if transformers cannot build the model, or cannot run it on shapes alone.
    """
    with traced_model(config, dtype) as model:
        _recompute(model, recompute)
        tokens = torch.zeros(batch, num_tokens // batch, dtype=torch.long)
        try:
            return _track(model, tokens, LOSSES[loss], has_gradient)
        except Exception as error:  # a model's own code may need values, which fake tensors lack
            raise _refuse(config, "run", error) from None


@contextmanager
def traced_model(config: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Any]:
    """Build the model of a config under fake tensors, with stand-ins for CUDA kernels. Raises: SpecError."""
    # transformers creates parameters in torch's default type
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with fused_attention(), FakeTensorMode(allow_non_fake_inputs=True):
            model = _build(config)
            with replace_kernels(model):
                yield model
    finally:
        torch.set_default_dtype(before)


def _build(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    known = {key: value for key, value in config.items() if key not in _NEVER_READ}
    try:
        parsed = AutoConfig.for_model(**known)
        _switch_off_dropout(parsed)
        kind = _find_class(parsed, known)
        with no_init_weights():
            model = kind._from_config(parsed, attn_implementation=_choose_attention(kind))
    except Exception as error:  # transformers raises many types for a broken config
        raise _refuse(config, "build", error) from None
    model.tie_weights()  # normally part of the initialization, which is skipped
    model.train()
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.training = False  # dropping a layer depends on a random value, which fake tensors lack
    return model


def _find_class(parsed: Any, config: Mapping[str, Any]) -> Any:
    """Find the transformers class that `architectures` names, else the class of the model type."""
    import transformers
    from transformers import AutoModelForCausalLM

    names = config.get("architectures") or [""]
    kind = getattr(transformers, str(names[0]), None) if str(names[0]).endswith(_HEADED) else None
    kind = kind or AutoModelForCausalLM._model_mapping.get(type(parsed), None)
    if kind is None:
        raise LookupError(f"no language model of transformers has model_type {parsed.model_type!r}")
    return kind


def _choose_attention(kind: Any) -> str:
    """Choose the flash-attention stand-in if the model lets attention be exchanged; otherwise its own attention."""
    if kind._supports_attention_backend or hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return ATTENTION
    return "sdpa" if kind._supports_sdpa else "eager"


def _switch_off_dropout(parsed: Any) -> None:
    for level in (parsed, parsed.get_text_config()):
        for key, value in level.to_dict().items():
            if isinstance(value, float) and ("drop" in key or "pdrop" in key):
                setattr(level, key, 0.0)


def _refuse(config: Mapping[str, Any], verb: str, error: Exception) -> SpecError:
    return SpecError(
        f"transformers cannot {verb} this config: {type(error).__name__}: {str(error)[:200]}",
        where=f"config.json: model_type {shorten_value(config.get('model_type'))}",
        rule="a model_type and shapes that the installed transformers supports; a repository's own code is never run",
        way_out="correct the config, or install a transformers version that supports the model",
    )


def _track(model: nn.Module, tokens: torch.Tensor, loss: LossFunction, has_gradient: bool) -> TracedPeak:
    from torch.distributed._tools.mem_tracker import MemTracker  # takes a second, because it loads the compiler

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker, torch.set_grad_enabled(has_gradient):
        value = loss(model, tokens)
        forward = _totals(tracker.get_tracker_snapshot("current"))
        if has_gradient:
            value.backward()
    peak = _totals(tracker.get_tracker_snapshot("peak"))
    return TracedPeak(
        parameters=peak["Parameter"],
        gradients=peak.get("Gradient", 0),
        rest=peak["Total"] - peak["Parameter"] - peak.get("Gradient", 0),
        end_of_forward=forward["Total"] - forward["Parameter"] - forward.get("Gradient", 0),
    )


def _totals(snapshot: Mapping[Any, Mapping[Any, int]]) -> dict[str, int]:
    """Add up bytes by MemTracker's categories."""
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
        # the decoder's layers are the model's longest list of modules
        layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        longest: nn.ModuleList = max(layers, key=len)
        decoder_layers: list[Any] = list(longest)
        for index, layer in enumerate(decoder_layers):
            layer.gradient_checkpointing = index % 2 == 0


def _body(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the hidden states of every token, as rows."""
    decoder = model.get_decoder()
    hidden: torch.Tensor = getattr(decoder, "model", decoder)(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1])


def _plain_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _chunked_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """All logits in the model's type; only one chunk at a time in fp32, in forward and backward."""
    logits = model.get_output_embeddings()(_body(model, tokens))
    parts = zip(logits.chunk(CHUNKS), tokens.reshape(-1).chunk(CHUNKS), strict=True)
    losses = (nn.functional.cross_entropy(part.float(), targets, reduction="sum") for part, targets in parts)
    return cast(torch.Tensor, sum(losses)) / tokens.numel()  # sum's type includes its start value 0


class _SelectedLogprobs(torch.autograd.Function):
    """log softmax(logits)[target] per row; the backward pass overwrites the logits with the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        normalizer = torch.cat(
            [part.logsumexp(-1) for part in logits.split(rows_on_cpu(logits.element_size()).multiplied)]
        )
        ctx.save_for_backward(logits, targets, normalizer)
        return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        scale = gradient.unsqueeze(-1)
        result = logits.detach().sub_(normalizer.unsqueeze(-1)).exp_().mul_(-scale)
        result.scatter_add_(-1, targets.unsqueeze(-1), scale)
        return result, None


def _compute_in_place_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model.get_output_embeddings()(_body(model, tokens)).float()
    logprobs: torch.Tensor = _SelectedLogprobs.apply(logits, tokens.reshape(-1))
    return logprobs.mean()


def _loss_by_rows(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The runtime's own head, with the GPU's number of rows at a time."""
    hidden, head = _body(model, tokens), model.get_output_embeddings()
    logprobs, *_ = HeadLogprobs.apply(hidden, head.weight, tokens.reshape(-1), 1.0, "seen", ROWS_ON_GPU)
    loss: torch.Tensor = logprobs.mean()
    return loss


def _value_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A value or reward head: one output instead of the vocabulary."""
    rows = _body(model, tokens)
    head = torch.zeros(1, rows.shape[-1], requires_grad=True)
    return nn.functional.linear(rows, head).float().square().mean()


LOSSES: dict[str, LossFunction] = {
    "plain": _plain_loss,
    "chunked": _chunked_loss,
    "in_place": _compute_in_place_loss,
    "by_rows": _loss_by_rows,
    "none": _value_loss,
}
