"""One decoder layer with adapters, tensor by tensor: what its passes take from the allocator and give back, in order.

In: a layer's widths, a micro-batch, the allocator (segments.py). Out: the same allocator, used.
Left out: layers other than attention and a gated MLP, dropout.

The order is the one in which autograd runs PEFT's `Linear.forward` under autocast: the frozen product, the input in the
adapters' fp32, that in 16 bits, A, B, the scaled copy, the sum. Norms, rotary positions and the gated activation are
Liger's kernels: a norm keeps its input, and writes its gradient over the one that it was handed; the activation writes
the gradients of gate and up over gate and up. Going back a layer is computed anew, up to the last tensor that is read.
A mask of pairs, which transformers makes where the padding token stands in a micro-batch, goes to another kernel: it is
added in 16 bits, and keys and values are repeated for every query head before.
Beside a base in 4 bits the residual stream and what a frozen product gives are fp32, a product's weight is dequantised
and its result copied.
Source: PEFT 0.19 tuners/lora/layer.py, bnb.py; transformers 5.11 integrations/sdpa_attention.py; Liger-Kernel
0.8 ops/rms_norm.py, swiglu.py, rope.py; torch 2.13
utils/checkpoint.py, transformers/cuda/flash_attn/flash_api.cpp (`mha_bwd`). Held to 35 traces of Qwen2.5
0.5B and 1.5B under fake tensors: allocated bytes within 13 MiB.
"""

from typing import NamedTuple

from rlplan.memory.machine.segments import Segments, Tensor
from rlplan.memory.model.block import FLOAT_BYTES, Block
from rlplan.records import dataclass

HALF_BYTES = 2
CUBLAS_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""What a thread's first product takes for good, and its first one with a bias once more. Source: torch 2.13
ATen/cuda/CublasHandlePool.cpp (`parseChosenWorkspaceSize`, one a handle, of which each thread has its own), GPUs before
Hopper. Assumes: cuBLASLt has one of its own, as AgileRL's peaks of 0.5B say."""
NORM_ROWS = 108
"""Rows of the partial sums of a norm's gradient, one a multiprocessor: an A100's."""


@dataclass(frozen=True)
class LayerSizes:
    """What decides the sizes of a layer's tensors."""

    block: Block
    num_tokens: int
    rank: int
    """Of the adapters, which stand beside every linear layer, in fp32."""
    is_quantized: bool = False
    """The base is in 4 bits, and all else fp32."""
    has_bias: bool = False
    """Of queries, keys and values, whose products cuBLASLt then computes."""
    mask_pairs: int = 0
    """Pairs of tokens that attention's mask names, of all sequences; 0 where no token is padding."""

    @property
    def element_bytes(self) -> int:
        """Of the residual stream, and of what a frozen product gives."""
        return FLOAT_BYTES if self.is_quantized else HALF_BYTES

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Width of the input and of the output of each linear layer."""
        block = self.block
        h, q, k, inner = block.hidden, block.q, block.k, block.intermediate
        attention = {"q": (h, q), "k": (h, k), "v": (h, k), "o": (q, h)}
        return attention | {"gate": (h, inner), "up": (h, inner), "down": (inner, h)}


class Kept(NamedTuple):
    """What one adapted product keeps for its backward pass; None where it is gone or was never there."""

    rows: Tensor | None
    """The input in 16 bits."""
    first: Tensor | None
    """A in 16 bits."""
    middle: Tensor | None
    """What A gave."""
    second: Tensor | None
    """B in 16 bits."""


class LayerPasses:
    """The passes of a layer over one allocator."""

    def __init__(self, sizes: LayerSizes, segments: Segments) -> None:
        self.sizes, self.segments = sizes, segments
        self.modules = sizes.modules
        self.gradients: list[Tensor] = []
        """Of the adapters, in fp32, until the optimizer's step."""
        self.copies: list[Tensor] | None = None
        """Adapters in 16 bits, which autocast keeps until a forward pass ends; None where it keeps none."""
        self.lacks_workspace = sizes.has_bias
        """Of cuBLASLt, in the thread that goes back."""

    def take(self, width: int, element_bytes: int) -> Tensor:
        """A tensor of all tokens of the micro-batch."""
        return self.segments.take(self.sizes.num_tokens * width * element_bytes)

    def give(self, *tensors: Tensor | None) -> None:
        """Give back those that are there."""
        self.segments.give(*(tensor for tensor in tensors if tensor is not None))

    def forward(self, *, has_gradient: bool) -> Tensor:
        """A pass that keeps nothing inside the layer. Returns the layer's output; its input is the caller's."""
        width, e = self.sizes.block.hidden, self.sizes.element_bytes
        rows, scales = self.take(width, e), self.take(1, FLOAT_BYTES)
        queries, keys, values = (self.product(name, has_gradient)[0] for name in ("q", "k", "v"))
        queries, keys, values = self._halves(queries, keys, values)
        masked = self._masked()
        attended, log_sums = self.take(self.sizes.block.q, HALF_BYTES), self.take(self._heads, FLOAT_BYTES)
        self.give(log_sums, *masked)
        projected = self.product("o", has_gradient)[0]
        self.give(attended, queries, keys, values, rows)
        between = self.take(width, e)
        self.give(projected)
        rows, more_scales = self.take(width, e), self.take(1, FLOAT_BYTES)
        gate, up = self.product("gate", has_gradient)[0], self.product("up", has_gradient)[0]
        product = self.take(self.sizes.block.intermediate, e)
        self.give(up, gate)
        result = self.product("down", has_gradient)[0]
        self.give(product, rows)
        output = self.take(width, e)
        self.give(result, between, more_scales, scales)
        return output

    def backward(self, entry: Tensor) -> None:
        """The layer computed anew from its entry and gone back through; its output's gradient is the caller's, and its
        input's is written over it.
        """
        block, e = self.sizes.block, self.sizes.element_bytes
        of_output = self.take(block.hidden, HALF_BYTES)  # the scaled gradient, made before anything is read
        scales, rows = self.take(1, FLOAT_BYTES), self.take(block.hidden, e)
        (queries, of_q), (keys, of_k), (values, of_v) = (self.product(name, True, keeps=True) for name in "qkv")
        queries, keys, values = self._halves(queries, keys, values)
        bias, *repeated = self._masked() or (None,)
        attended, log_sums = self.take(block.q, HALF_BYTES), self.take(self._heads, FLOAT_BYTES)
        projected, of_o = self.product("o", True, keeps=True)
        self.give(rows)
        if repeated:
            self.give(keys, values)
            keys, values = repeated
        between = self.take(block.hidden, e)
        self.give(projected)
        rows, more_scales = self.take(block.hidden, e), self.take(1, FLOAT_BYTES)
        (gate, of_gate), (up, of_up) = (self.product(name, True, keeps=True) for name in ("gate", "up"))
        product = self.take(block.intermediate, e)
        of_down = self._begun("down")
        self.give(product, rows)
        self.give(self.back("down", of_down, None, scaled=of_output))
        gradient = self.back("gate", of_gate, gate, into=self.back("up", of_up, up))
        self._leave_norm(between, more_scales, gradient)
        gradient = self.back("o", of_o, None)
        self._leave_attention((queries, keys, values, attended, log_sums, gradient, bias), (of_q, of_k, of_v))
        self.give(scales, entry)

    @property
    def _heads(self) -> int:
        return self.sizes.block.num_heads

    def _leave_norm(self, *freed: Tensor) -> None:
        self.give(self.segments.take(NORM_ROWS * self.sizes.block.hidden * FLOAT_BYTES))
        self.give(*freed)

    def _masked(self) -> tuple[Tensor, ...]:
        """The mask in 16 bits and, where query heads share keys and values, those of every head."""
        block = self.sizes.block
        if not self.sizes.mask_pairs:
            return ()
        repeated = [self.take(block.q, HALF_BYTES) for _ in range(2)] if block.k < block.q else []
        return self.segments.take(self.sizes.mask_pairs * HALF_BYTES), *repeated

    def _leave_attention(self, held: tuple[Tensor | None, ...], kept: tuple[Kept, Kept, Kept]) -> None:
        """Gradients of queries, keys and values; the kernel adds those of queries in fp32, and has keys' and values' of
        every query head where heads share them.
        """
        block = self.sizes.block
        gradients = [self.take(width, HALF_BYTES) for width in (block.q, block.k, block.k)]
        working = [self.take(self._heads, FLOAT_BYTES), self.take(block.q, FLOAT_BYTES)]
        working += [self.take(block.q, HALF_BYTES) for _ in range(2)] if block.k < block.q else []
        self.give(*reversed(working), *held)
        if self.sizes.is_quantized:
            for place, width in enumerate((block.q, block.k, block.k)):
                cast = self.take(width, FLOAT_BYTES)
                self.give(gradients[place])
                gradients[place] = cast
        of_input = None
        for name, place in (("v", 2), ("k", 1), ("q", 0)):
            of_input = self.back(name, kept[place], gradients[place], into=of_input)
        self._leave_norm(*(() if of_input is None else (of_input,)))

    def _halves(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values in 16 bits."""
        if not self.sizes.is_quantized:
            return tensors
        block = self.sizes.block
        halves = tuple(self.take(width, HALF_BYTES) for width in (block.q, block.k, block.k))
        self.give(*tensors)
        return halves

    def _frozen(self, name: str) -> Tensor:
        """The frozen weight's product."""
        into, out = self.modules[name]
        if not self.sizes.is_quantized:
            return self.take(out, HALF_BYTES)
        rows = None if name == "o" else self.take(into, HALF_BYTES)
        weight, result = self.segments.take(into * out * HALF_BYTES), self.take(out, HALF_BYTES)
        self.give(weight, rows)
        upcast = self.take(out, FLOAT_BYTES)
        self.give(result)
        copy = self.take(out, FLOAT_BYTES)
        self.give(upcast)
        return copy

    def _input_copies(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """The adapters' input in fp32 and, from it, in 16 bits, as far as it is not there in that type."""
        into = self.modules[name][0]
        if not self.sizes.is_quantized:
            return self.take(into, FLOAT_BYTES), self.take(into, HALF_BYTES)
        return None, None if name == "o" else self.take(into, HALF_BYTES)

    def product(self, name: str, has_gradient: bool, *, keeps: bool = False) -> tuple[Tensor, Kept]:
        """One adapted product. Returns its result, and what it keeps."""
        into, out = self.modules[name]
        rank, keep = self.sizes.rank, Kept(None, None, None, None)
        base = self._frozen(name)
        if keeps and self.lacks_workspace:
            self.lacks_workspace = False
            self.segments.take(CUBLAS_WORKSPACE)
        wide, rows = self._input_copies(name)
        first, middle = self.segments.take(rank * into * HALF_BYTES), self.take(rank, HALF_BYTES)
        if not keeps:
            self.give(rows)
            self._let_go(first)
        second, plain = self.segments.take(rank * out * HALF_BYTES), self.take(out, HALF_BYTES)
        if keeps:
            keep = Kept(rows, first, middle, second)
        else:
            self.give(middle)
            self._let_go(second)
        scaled = self.take(out, HALF_BYTES)
        self.give(plain)
        if not has_gradient:
            self.give(wide)
            wide = None
        result = self.take(out, self.sizes.element_bytes)
        self.give(scaled, base, wide)
        return result, keep

    def _let_go(self, adapter: Tensor) -> None:
        """An adapter's 16-bit copy, when it has been used."""
        if self.copies is None:
            self.give(adapter)
        else:
            self.copies.append(adapter)

    def _begun(self, name: str) -> Kept:
        """The last product of a layer that is computed anew: nothing after A is read."""
        into = self.modules[name][0]
        base = self._frozen(name)
        wide, rows = self._input_copies(name)
        first = self.segments.take(self.sizes.rank * into * HALF_BYTES)
        middle = self.take(self.sizes.rank, HALF_BYTES)
        self.give(wide, base)
        return Kept(rows, first, middle, None)

    def _adapter_gradient(self, numel: int) -> None:
        half = self.segments.take(numel * HALF_BYTES)
        self.gradients.append(self.segments.take(numel * FLOAT_BYTES))
        self.give(half)

    def back(
        self,
        name: str,
        kept: Kept,
        gradient: Tensor | None,
        *,
        scaled: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """Back through one adapted product. gradient: of its result, let go at the end. scaled: the same, scaled, where
        it is there already. into: what the input's gradient is added to. Returns that gradient.
        """
        width, out = self.modules[name]
        e, is_half = self.sizes.element_bytes, name == "o" or not self.sizes.is_quantized
        scaled = self.take(out, HALF_BYTES) if scaled is None else scaled
        self._adapter_gradient(self.sizes.rank * out)
        of_middle = self.take(self.sizes.rank, HALF_BYTES)
        self.give(scaled, kept.middle, kept.second)
        self._adapter_gradient(self.sizes.rank * width)
        found = self.take(width, HALF_BYTES)
        self.give(kept.rows, kept.first, of_middle)
        if not self.sizes.is_quantized:
            wide = self.take(width, FLOAT_BYTES)
            self.give(found)
            found = self.take(width, HALF_BYTES)
            self.give(wide)
        elif not is_half:
            wide = self.take(width, e)
            self.give(found)
            found = wide
        if into is not None:
            self.give(found)
            found = into
        self.give(self._frozen_back(name, is_half), gradient)
        return found

    def _frozen_back(self, name: str, is_half: bool) -> Tensor:
        """What the frozen product's backward pass adds to the input's gradient."""
        width, out = self.modules[name]
        if not self.sizes.is_quantized:
            return self.take(width, HALF_BYTES)
        half, weight = self.take(out, HALF_BYTES), self.segments.take(width * out * HALF_BYTES)
        found = self.take(width, HALF_BYTES)
        self.give(weight, half)
        if is_half:
            return found
        upcast = self.take(width, FLOAT_BYTES)
        self.give(found)
        return upcast
