"""Kernels: what a trainer runs between and inside its matmuls, and the share of a peak that they reach.

In: a trainer's habits, a cluster, sizes. Out: rates. Left out: autotuning, which version of a library is installed.

Symbols: T rows (tokens), n columns of a matmul, w waves of tiles over the chip.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from rlplan.memory.trainers.shape import recompute_named
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.spec.parts.training import TrainingSpec
from rlplan.timing.network.cluster import Cluster
from rlplan.vocabulary import Backend

WAVE = 132 * 128 * 256
"""Outputs that a chip computes at once: a tile of 128 x 256 on each of 132 multiprocessors (H100; A100: 108)."""
LOST_ROWS = 192
"""Rows that an expert's matmul costs beyond its own: the half of a tile of 128 that is empty, and filling and draining
the pipeline of one expert's matmuls. Source: grouped matmuls of Transformer Engine measured on A100 and B200 (SimuMax,
configs/system, `group_matmul`), forward over what large matmuls reach: 0.40 with 128 rows, 0.57 with 256, 0.75 with
512, 0.88 with 1,024, 0.97 with 2,460 (B200); 0.79 with 616, 0.86 with 1,232 (A100)."""

EXPERTS_LAUNCHED = 9e-3
"""Seconds in which Megatron's host launches a layer of experts forward and backward, with its dispatcher's waits for
counts of tokens. Fitted: Qwen3-30B-A3B alone says 8.7e-3, Qwen3-235B-A22B 8.5e-3 to 10e-3 on B200, 7.4e-3 to 9.2e-3
on H100, DeepSeek-V3 13e-3. Left out (benchmarks/constants/trainers.py): Qwen3-30B's value errs by 14.2 % of the 24
others, 34.0 % without it; Nemotron 3, which was no part of it, is met within 30 %. Forward alone a third of it."""


class Attention(StrEnum):
    """The attention kernel. FLASH_1: 2022 and Triton's. FLASH_2: what torch and transformers run. FLEX: compiled from
    a mask (torch's FlexAttention). VENDOR: written for the chip (FlashAttention 3, cuDNN, Composable Kernel), which
    Transformer Engine runs."""

    FLASH_1 = "flash_1"
    FLASH_2 = "flash_2"
    FLEX = "flex"
    VENDOR = "vendor"


@dataclass(frozen=True)
class Kernels:
    """A trainer's kernels."""

    is_fused: bool = False
    """Norms, rotary positions and activations are one kernel each."""
    attention: Attention = Attention.FLASH_2
    has_fp8: bool = False
    """Matmuls of the layers in 8-bit floats."""
    scales_rows: bool = False
    """8-bit matmuls have a scale for each row and column, and ranks of tensor parallelism gather 16 bits (torchao's
    row-wise float8)."""
    has_fp4: bool = False
    """Matmuls of the layers in 4-bit floats, where the chip has them."""
    stores_scores: bool = False
    """Attention writes its scores (before FlashAttention)."""
    modules: frozenset[str] = frozenset()
    """Of a layer, which the backward pass computes anew (modules.py)."""
    reduce_bytes: int = 2
    """Of a gradient's element on the way."""
    hides_tp: bool = False
    """Tensor parallel collectives run beside the matmuls that they feed (async TP)."""
    hides_step: bool = True
    """Reductions and gathers of an optimizer step run beside passes."""
    virtual_stages: int = 1
    """Of an interleaved pipeline."""
    sends_once: bool = False
    """A row goes to each host once, whatever experts it has there (DeepEP, HybridEP)."""
    hides_experts: bool = False
    """Rows travel to experts beside the matmuls of another micro-batch (Megatron's expert overlap)."""
    main_gradient_bytes: int = 0
    """Read and written of each expert's weight in every pass: gradients in fp32 that a matmul adds to (Megatron). Those
    of other weights hide behind their matmuls' many rows."""
    tokens_ahead: int = 0
    """Tokens that are predicted beyond the next one (multi-token prediction)."""
    waits_per_expert_layer: float = 0.0
    """Seconds that a layer of experts waits for its host, forward and backward, where no CUDA graph has it."""
    gathers_8bit: bool = False
    """Tensor parallel ranks gather rows, and gradients, that have been cast to 8 bits, by one scale a tensor, and
    transpose them afterwards (torchao)."""
    weight_casts: int = 0
    """Bytes in which a rank casts each gathered weight to 8 bits before each matmul; 0 where shards are cast."""


@lru_cache(maxsize=256)
def kernels_of(backend: Backend, training: TrainingSpec) -> Kernels:
    """What a trainer runs: its backend's kernels (transformers' modules, or Megatron's with Transformer Engine) but for
    what `training.kernels` and its neighbours say.

    Counts: torchao casts each gathered weight before a matmul with scales for rows (5 bytes) or blocks (3), and gathers
    8 bits where one scale is a tensor's; Megatron adds gradients to buffers, in fp32 those of experts are 8 bytes read
    and written in every pass, in bf16 4.
    """
    asked, is_megatron = training.kernels, backend == "megatron"
    attention = Attention.VENDOR if is_megatron else Attention.FLASH_2
    has_fp8, sum_bytes = asked.matmuls in ("fp8", "fp8_rowwise", "mxfp8"), 0
    if training.reduce_dtype != "auto" and is_megatron:
        sum_bytes = 2 * training.reduce_dtype.num_bytes
    is_torchao = has_fp8 and not is_megatron
    return Kernels(
        is_fused=is_megatron or asked.is_compiled,
        attention=ASKED.get(asked.attention, attention),
        has_fp8=has_fp8,
        scales_rows=asked.matmuls == "fp8_rowwise",
        has_fp4=asked.matmuls == "fp4",
        stores_scores=asked.attention == "unfused",
        modules=recompute_named(training.recomputed)[1],
        reduce_bytes=2 if training.reduce_dtype == "auto" else training.reduce_dtype.num_bytes,
        hides_tp=asked.overlaps_tp,
        hides_step=asked.overlaps_step,
        virtual_stages=training.virtual_stages,
        sends_once=asked.expert_dispatcher in ("deepep", "hybridep"),
        hides_experts=asked.overlaps_experts,
        main_gradient_bytes=sum_bytes,
        tokens_ahead=training.predicts_ahead,
        waits_per_expert_layer=EXPERTS_LAUNCHED if is_megatron and asked.has_cuda_graphs is not True else 0.0,
        gathers_8bit=is_torchao and asked.matmuls == "fp8",
        weight_casts={"fp8_rowwise": 5, "mxfp8": 3}.get(asked.matmuls, 0) if is_torchao else 0,
    )


ASKED = {
    "flash_1": Attention.FLASH_1,
    "flash_2": Attention.FLASH_2,
    "flash_3": Attention.VENDOR,
    "flex": Attention.FLEX,
}
"""Kernels by the words of `training.kernels.attention`."""
ATTENTION_SHARE = {
    (Attention.FLASH_2, "8"): 0.78,
    (Attention.FLASH_2, "9"): 0.50,
    (Attention.FLASH_2, "10"): 0.30,
    (Attention.VENDOR, "8"): 0.78,
    (Attention.VENDOR, "9"): 1.0,
    (Attention.VENDOR, "10"): 0.93,
}
"""Share of what matmuls reach, forward and backward together, by the major compute capability. Source: Dao 2023, table
of A100, causal, d = 128: 180 of 312 TFLOP/s, on H100 up to 335 of 989 without a mask, 300 with; Shah et al. 2024
(FlashAttention 3): 550 to 600 forward, 450 to 500 backward of 4,096 tokens, 640 and 560 of 16,384. B200: 980 and 820
TFLOP/s of 4,096 tokens (SimuMax, configs/system/b200_bf16_ceperm.json, `sdp_fwd`, `sdp_bwd`; they count no mask)."""
RAMP = 1000
"""Tokens of a sequence with which a vendor's kernel of Hopper and later reaches half of what long ones reach: blocks on
the diagonal are computed whole, and loads are not yet hidden. Source: Shah et al. 2024, figures 5 and 6."""
OTHER_ATTENTION = 0.5
"""Of chips without a published figure (AMD, V100, consumer Blackwell): assumed."""
OF_FLASH_2 = {Attention.FLASH_1: 1 / 1.8, Attention.FLEX: 0.86}
"""Source: Dao 2023, section 4.1: version 2 is 1.7 to 3.0 times as fast as version 1, around 2; Triton's 1.3 to 2.5.
FlexAttention has 90 % of version 2 forward and 85 % backward (PyTorch's blog of August 2024)."""
WIDE_HEAD = 128
"""Elements of a head that the shares above are of."""
EXPONENTIALS = {Attention.FLASH_2: 0.11, Attention.VENDOR: 0.25}
"""Share of a kernel's time at heads of 128 that goes by scores, not by elements: each has its exponential whatever the
width. Source: Shah et al. 2024, figures 5 and 6, 4,096 and 16,384 tokens on H100, heads of 64 and 128: version 2 takes
1.11 and 1.11 times as long a FLOP, version 3 1.25 and 1.22, cuDNN 1.26; one time forward and 2.5 backward."""


def attention_flops_per_s(cluster: Cluster, kernels: Kernels, length: float, head_dim: int = WIDE_HEAD) -> float:
    """FLOP per second of attention over sequences of some length.

    Counts: the matmuls' share of the peak in 16 bits, times the kernel's share, of a vendor's kernel of Hopper and
    later times s / (s + 1000); of heads narrower than 128 over 1 + f (128 / d - 1). Source: `ATTENTION_SHARE`, `RAMP`,
    `EXPONENTIALS`.
    """
    major = cluster.gpu.architecture.partition(".")[0]
    kind = Attention.FLASH_2 if kernels.attention in OF_FLASH_2 else kernels.attention
    share = ATTENTION_SHARE.get((kind, major), OTHER_ATTENTION) * OF_FLASH_2.get(kernels.attention, 1.0)
    if kind is Attention.VENDOR and major in ("9", "10"):
        share *= length / (length + RAMP)
    if head_dim < WIDE_HEAD:
        share /= 1 + EXPONENTIALS[kind] * (WIDE_HEAD / head_dim - 1)
    return matmul_flops_per_s(cluster) * share


@lru_cache(maxsize=4096)
def matmul_flops_per_s(cluster: Cluster, *, has_fp8: bool = False, has_fp4: bool = False) -> float:
    """FLOP per second of large matmuls. Raises: SpecError where the chip has no such type.

    Counts: the dense peak times `efficiencies.matmul`; 16-bit floats of whichever kind the chip has.
    """
    rates = cluster.gpu.dense_flops_per_s
    kinds = [ComputeDtype.FLOAT4] if has_fp4 else []
    kinds += [ComputeDtype.FLOAT8] if has_fp8 or has_fp4 else []
    kinds += [ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16]
    found = next((kind for kind in kinds if kind in rates), ComputeDtype.BFLOAT16)
    reached = cluster.efficiencies
    narrow = reached.matmul_8bit if found in (ComputeDtype.FLOAT8, ComputeDtype.FLOAT4) else None
    return cluster.gpu.flops_per_s(found) * (narrow or reached.matmul).value


def wave_share(num_rows: float, num_columns: float) -> float:
    """Share of a chip that a matmul with T x n outputs keeps busy.

    Counts: w / (w + 1/2), w = T n / `WAVE`: of the last wave half is empty on average. Source: NVIDIA, matrix
    multiplication background user's guide, wave quantisation. Assumes: tiles of 128 x 256.

    >>> round(wave_share(8192, 4096), 3), round(wave_share(512, 2048), 3)
    (0.939, 0.327)
    """
    waves = num_rows * num_columns / WAVE
    return waves / (waves + 0.5)


def tile_share(num_rows: float) -> float:
    """Share of what large matmuls reach that an expert with so many rows reaches.

    Counts: r / (r + 192). Source: `LOST_ROWS`.

    >>> tile_share(192), tile_share(1728)
    (0.5, 0.9)
    """
    return num_rows / (num_rows + LOST_ROWS)
