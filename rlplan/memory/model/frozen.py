"""Frozen layers: bytes that a layer saves for its backward pass when its own weights are not trained.

In: a Block, and the adapters beside its frozen weights. Out: bytes for a number of tokens.
Left out: adapters' own weights (spec/models/adapters.py), quantized bytes (quantization.py).

Symbols: h hidden, q width of the queries, k of the keys, I width of the MLP, e bytes of an element, a bytes of an
adapter's element.
Source: torch 2.13 derivatives.yaml (`mm` and `mul` save an operand only where the other one needs a gradient);
validated with real layers and adapters in tests/memory/model/test_frozen.py.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from rlplan.memory.model.activations import attention_saved_bytes
from rlplan.memory.model.block import FLOAT_BYTES, Block, Norm
from rlplan.spec.model import Component, Parameter

MASK_BYTES = 1
"""Bytes of an element of dropout's mask (torch 2.13, `native_dropout`)."""


@dataclass(frozen=True)
class Frozen:
    """The adapters of a layer whose weights are frozen."""

    attention_inputs: int = 0
    """Adapted modules that read the output of the first norm: queries, keys, values."""

    adapts_output: bool = False
    """Whether the last projection of attention is adapted."""

    mlp_inputs: int = 0
    """Adapted modules that read the output of the second norm: gate, up."""

    adapts_down: bool = False
    """Whether the last projection of the MLP is adapted."""

    adapts_experts: bool = False
    """Whether gate, up and down of every routed expert are adapted; each reads rows of its own."""

    adapter_bytes: int = 2
    """Bytes of an adapter's element. If they differ from the model's, each adapter reads a cast copy of its input."""

    has_dropout: bool = False
    """Whether each adapter reads its input through dropout, which is a copy of its own."""

    more_token_bytes: int = 0
    """Bytes per token that adapters save for the backward pass in addition to their inputs."""

    scales_outputs: bool = False
    """Whether an adapter's output and a scaled copy of it are in flight (PEFT's `Linear.forward`)."""


def frozen_layer_bytes(block: Block, frozen: Frozen, num_tokens: int, element_bytes: int) -> int:
    """Bytes that a layer with frozen weights saves for its backward pass.

    Counts: the tensors that norms, attention and the activation function need for their own gradients; adapters' inputs
    (`adapter_input_bytes`) and their further tensors. Frozen linear layers save no input.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=128)
    >>> frozen_layer_bytes(block, Frozen(), 1, 2)  # norms 2*(4*64 + 4), attention 8*64 + 16, MLP 3*2*128
    1816
    """
    e = element_bytes
    norms = block.num_norms * _norm_bytes(block.norm, block.hidden, e)
    attention = attention_saved_bytes(block, e)
    # A frozen qk-norm does not save its normed output, which only the gradient of its own weight needs.
    if block.qk_norm != "none" and block.norm in (Norm.RMS, Norm.RMS_FP32):
        attention -= (e if block.norm is Norm.RMS else FLOAT_BYTES) * (block.q + block.k)
    adapters = adapter_input_bytes(block, frozen, e) + frozen.more_token_bytes
    token_bytes = norms + attention + _mlp_bytes(block, e) + adapters
    if block.per_layer_width:  # the gate's activation and product, and the norm after them
        token_bytes += 3 * e * block.per_layer_width
        token_bytes += _norm_bytes(block.norm, block.hidden, e)
    return num_tokens * token_bytes


def frozen_final_bytes(block: Block, frozen: Frozen, num_tokens: int, element_bytes: int) -> int:
    """Bytes saved outside the layers with a frozen head, which saves no input: the last norm and the rotary table.

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=128)
    >>> frozen_final_bytes(block, Frozen(), 1, 2)  # 4*64 + 4, and 2*2*16
    324
    """
    norm = _norm_bytes(block.norm, block.hidden, element_bytes)
    return num_tokens * (norm + block.rotary_table_bytes(element_bytes))


def adapter_input_bytes(block: Block, frozen: Frozen, element_bytes: int) -> int:
    """Bytes for a token of the inputs that adapters' first matrices read.

    Counts: in the model's type without dropout one tensor that all modules after a norm share; attention's output is
    saved already. Otherwise a copy for every module, and with dropout a mask of one byte an element. For experts k rows
    of 2h + Ie.
    Source: PEFT 0.18 tuners/lora/layer.py (`_cast_input_dtype`, `lora_dropout`).

    >>> block = Block(hidden=64, num_heads=4, num_kv_heads=4, head_dim=16, intermediate=128)
    >>> adapter_input_bytes(block, Frozen(attention_inputs=2), 2)
    128
    >>> adapter_input_bytes(block, Frozen(mlp_inputs=2, adapts_down=True, adapter_bytes=4), 2)  # 4 * (64 + 64 + 128)
    1024
    >>> from rlplan.memory.model.block import Experts
    >>> block = Block(64, 4, 4, 16, 128, experts=Experts(num=8, top_k=2, width=32))
    >>> adapter_input_bytes(block, Frozen(adapts_experts=True, adapter_bytes=4), 2)  # 4 * 2 * (2 * 64 + 32)
    1280
    """
    width = block.intermediate if block.experts is None else block.experts.shared_width
    modules = [
        (block.hidden, frozen.attention_inputs, True),
        (block.q, int(frozen.adapts_output), False),
        (block.hidden, frozen.mlp_inputs, True),
        (width, int(frozen.adapts_down), True),
    ]
    if frozen.adapts_experts and block.experts is not None:
        rows = block.experts.top_k * (2 * block.hidden // block.experts.row_shards + block.experts.width)
        modules.append((rows, 1, True))
    if frozen.has_dropout or frozen.adapter_bytes != element_bytes:
        copy_bytes = frozen.adapter_bytes + (MASK_BYTES if frozen.has_dropout else 0)
        return copy_bytes * sum(size * count for size, count, _ in modules)
    return element_bytes * sum(size for size, count, is_new in modules if count and is_new)


def _norm_bytes(kind: Norm, width: int, element_bytes: int) -> int:
    """Bytes of a norm's input (in fp32 for RMS norms) and scales, for one token."""
    if kind in (Norm.RMS, Norm.RMS_FP32):
        return FLOAT_BYTES * width + FLOAT_BYTES
    return element_bytes * width + (2 * element_bytes if kind is Norm.LAYER else FLOAT_BYTES)


def _mlp_bytes(block: Block, element_bytes: int) -> int:
    """Bytes that the MLP or the experts save for one token without the inputs of their linear layers."""
    experts, e = block.experts, element_bytes
    # The last linear layer's input is one of the saved tensors. Frozen, it is not needed, hence minus one.
    if experts is None:
        return (block.mlp_saved_widths - 1) * e * block.intermediate
    row_bytes = (e * block.hidden + 40) // experts.row_shards
    rows = experts.top_k * ((experts.saved_widths - 1) * e * experts.width + row_bytes)
    return rows + FLOAT_BYTES * experts.num + 3 * e * experts.shared_width


@lru_cache(maxsize=256)
def describe_adapters(adapters: tuple[Parameter, ...], element_bytes: int) -> Frozen:
    """Describe the adapters of a layer by their names, in the model's type.

    Counts: per token e*r for each output of an A matrix, which its B matrix reads.

    >>> names = ("layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight")
    >>> describe_adapters((Parameter(names[0], (8, 64)), Parameter(names[1], (64, 8))), 2).more_token_bytes
    16
    """
    adapts_experts = any(adapter.component is Component.EXPERTS for adapter in adapters)
    adapters = tuple(adapter for adapter in adapters if adapter.component is not Component.EXPERTS)
    names = {adapter.name.split(".lora_")[0].rpartition(".")[2]: adapter.component for adapter in adapters}
    last = {name for name in names if name.startswith(_LAST_OF_A_BLOCK)}
    attention = {name for name, component in names.items() if component is Component.ATTENTION}
    first = [adapter.shape[0] for adapter in adapters if ".lora_A." in adapter.name]
    num_layers = max(1, len({_layer_digits(adapter.name) for adapter in adapters}))
    return Frozen(
        attention_inputs=len(attention - last),
        adapts_output=bool(attention & last),
        mlp_inputs=len(set(names) - attention - last),
        adapts_down=bool(last - attention),
        adapts_experts=adapts_experts,
        adapter_bytes=element_bytes,
        more_token_bytes=element_bytes * sum(first) // num_layers,
        scales_outputs=True,
    )


@lru_cache(maxsize=1 << 16)
def _layer_digits(name: str) -> str:
    """All digits in the name of the layer that an adapter stands beside."""
    return re.sub(r"\D", "", name.split(".lora_")[0])


_LAST_OF_A_BLOCK = ("o_proj", "out_proj", "dense", "c_proj", "wo", "down_proj", "fc2", "fc_out")
"""Projections that end attention or the MLP, in the names of transformers 5.19."""
