"""Kernels of a trainer, between and inside its matmuls, and the share of peak rates that they reach.

In: a trainer's settings, a cluster, sizes. Out: rates. Left out: autotuning, installed library versions.

Symbols: T rows (tokens), n columns of a matmul, w waves of tiles over the chip.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from rlplan.memory.trainers.shape import parse_recompute
from rlplan.spec.hardware.profile import ComputeDtype
from rlplan.spec.parts.training import KernelsSpec, TrainingSpec
from rlplan.timing.network.cluster import Cluster
from rlplan.vocabulary import Backend

WAVE = 132 * 128 * 256
"""Outputs that a chip computes at once: a tile of 128 x 256 on each of 132 multiprocessors (H100; A100: 108)."""
LOST_ROWS = 192
"""Overhead of an expert's matmul, in rows: half a tile of 128 that is empty, and filling and draining the pipeline.
Source: grouped matmuls of Transformer Engine measured on A100 and B200 (SimuMax, configs/system, `group_matmul`),
forward, relative to large matmuls: 0.40 with 128 rows, 0.57 with 256, 0.75 with 512, 0.88 with 1,024, 0.97 with 2,460
(B200); 0.79 with 616, 0.86 with 1,232 (A100)."""

LAYER_LAUNCHED = 6.5e-3
"""Seconds in which Megatron's host launches a dense layer forward and backward. Source: Qwen3-8B on H100 with packed
sequences of 2,048 tokens, where devices wait for it (Megatron-Bridge, model_verification_cards/qwen3-8b): 6.45e-3 in
SFT, 6.75e-3 with LoRA. A forward pass takes a third of it."""
EXPERTS_LAUNCHED = 13e-3
"""The same for an expert layer, with its dispatcher's waits for token counts. Source: what small micro-batches take
beyond their devices' work: 11.7e-3 and 12.9e-3 (ms-swift, Qwen1.5-MoE and Qwen3-30B-A3B on A100), 11.5e-3 and 15.5e-3
(Megatron-Bridge's cards, gpt-oss-20b on H100), 14.5e-3 (Qwen3-30B-A3B with LoRA)."""
FUSED_EXPERTS_LAUNCHED = 9e-3
"""The same with a fused router. Fitted: Qwen3-30B-A3B alone gives 8.7e-3 on B200 and 9.4e-3 on H100, Qwen3-235B-A22B
8.5e-3 to 10e-3 on B200, 7.4e-3 to 9.2e-3 on H100, DeepSeek-V3 13e-3. Cross-check: benchmarks/constants/trainers.py."""
ATTENTION_LAUNCHED = 3.6e-3
"""The part of an expert layer that is not its router or dispatcher. Source: what remains of Qwen3-30B-A3B's steps on 16
H100 with CUDA graphs of router and dispatcher: 3.6e-3 and 3.7e-3 (Megatron-Bridge's card and its perf-moe skills)."""


class Attention(StrEnum):
    """The attention kernel.

    FLASH_1: of 2022, and Triton's. FLASH_2: the one in torch and transformers. FLEX: compiled from a mask (torch's
    FlexAttention). VENDOR: written for the chip (FlashAttention 3, cuDNN, Composable Kernel), as in Transformer Engine.
    """

    FLASH_1 = "flash_1"
    FLASH_2 = "flash_2"
    FLEX = "flex"
    VENDOR = "vendor"


@dataclass(frozen=True)
class Kernels:
    """Kernels and overlap settings of a trainer."""

    is_fused: bool = False
    """Norms, rotary positions and activations are one kernel each."""
    attention: Attention = Attention.FLASH_2
    has_fp8: bool = False
    """Matmuls of the layers use 8-bit floats."""
    scales_rows: bool = False
    """8-bit matmuls have a scale for each row and column, and tensor-parallel ranks gather 16 bits (torchao's
    row-wise float8)."""
    has_fp4: bool = False
    """Matmuls of the layers use 4-bit floats, where the chip supports them."""
    stores_scores: bool = False
    """Attention writes its scores to memory (as before FlashAttention)."""
    modules: frozenset[str] = frozenset()
    """Modules of a layer that the backward pass recomputes (elementwise.py)."""
    reduce_bytes: int = 2
    """Bytes per gradient element in a reduction."""
    hides_tp: bool = False
    """Tensor-parallel collectives overlap with the matmuls that use their results (async TP)."""
    hides_step: bool = True
    """Reductions and gathers of an optimizer step overlap with passes."""
    virtual_stages: int = 1
    """Virtual stages per rank of an interleaved pipeline."""
    sends_once: bool = False
    """A row goes to each host once, whatever experts it has there (DeepEP, HybridEP)."""
    hides_experts: bool = False
    """Rows travel to experts during the matmuls of another micro-batch (Megatron's expert overlap)."""
    main_gradient_bytes: int = 0
    """Bytes read and written per expert weight in every pass, where matmuls accumulate into fp32 gradients (Megatron).
    For other weights, matmuls with many rows hide this traffic."""
    tokens_ahead: int = 0
    """Tokens that are predicted beyond the next one (multi-token prediction)."""
    layer_launch_s: float = 0.0
    """Seconds in which the host launches a dense layer forward and backward; 0 where kernels are counted one by one."""
    expert_launch_s: float = 0.0
    """Seconds that an expert layer waits for its host, forward and backward, beside its CUDA graphs."""
    expert_imbalance: float = 1.0
    """Rows of the busiest expert-parallel rank relative to the mean."""
    gathers_8bit: bool = False
    """Tensor-parallel ranks gather rows and gradients in 8 bits with tensor scales, and transpose them afterwards
    (torchao)."""
    weight_casts: int = 0
    """Bytes per weight of casting each gathered weight to 8 bits before each matmul; 0 where shards are cast."""


@lru_cache(maxsize=256)
def choose_kernels(backend: Backend, training: TrainingSpec) -> Kernels:
    """Choose the kernels of a trainer: its backend's defaults, changed by `training.kernels` and its neighbours.

    The defaults are transformers' modules, or Transformer Engine for Megatron.
    Counts: torchao casts each gathered weight before a matmul with row scales (5 bytes) or block scales (3), and
    gathers 8 bits with tensor scales. Megatron accumulates gradients in buffers; those of experts are read and written
    in every pass, 8 bytes in fp32 and 4 in bf16. FSDP2 reduces gradients in fp32. Source of the latter: verl 0.9.0,
    fsdp/transformer_impl.py:375; NeMo-RL 0.3.0, dtensor/parallelize.py:466.
    """
    asked, is_megatron = training.kernels, backend == "megatron"
    attention = Attention.VENDOR if is_megatron else Attention.FLASH_2
    has_fp8, sum_bytes = asked.matmuls in ("fp8", "fp8_rowwise", "mxfp8"), 0
    if training.reduce_dtype != "auto" and is_megatron:
        sum_bytes = 2 * training.reduce_dtype.num_bytes
    is_torchao, usual_reduce_bytes = has_fp8 and not is_megatron, 4 if backend == "fsdp2" else 2
    return Kernels(
        is_fused=is_megatron or asked.is_compiled,
        attention=ATTENTION_NAMES.get(asked.attention, attention),
        has_fp8=has_fp8,
        scales_rows=asked.matmuls == "fp8_rowwise",
        has_fp4=asked.matmuls == "fp4",
        stores_scores=asked.attention == "unfused",
        modules=parse_recompute(training.recomputed)[1],
        reduce_bytes=usual_reduce_bytes if training.reduce_dtype == "auto" else training.reduce_dtype.num_bytes,
        hides_tp=asked.overlaps_tp,
        hides_step=asked.overlaps_step,
        virtual_stages=training.virtual_stages,
        sends_once=asked.expert_dispatcher in ("deepep", "hybridep"),
        hides_experts=asked.overlaps_experts,
        main_gradient_bytes=sum_bytes,
        tokens_ahead=training.predicts_ahead,
        layer_launch_s=LAYER_LAUNCHED if is_megatron and asked.has_cuda_graphs is not True else 0.0,
        expert_launch_s=_expert_launch_s(asked) if is_megatron else 0.0,
        expert_imbalance=asked.expert_imbalance,
        gathers_8bit=is_torchao and asked.matmuls == "fp8",
        weight_casts={"fp8_rowwise": 5, "mxfp8": 3}.get(asked.matmuls, 0) if is_torchao else 0,
    )


def _expert_launch_s(asked: KernelsSpec) -> float:
    """Seconds in which Megatron's host launches what no CUDA graph holds of an expert layer."""
    whole = FUSED_EXPERTS_LAUNCHED if asked.fuses_router is True else EXPERTS_LAUNCHED
    rest = {"router": ATTENTION_LAUNCHED, "attention": whole - ATTENTION_LAUNCHED, True: 0.0}
    return rest.get(asked.has_cuda_graphs, whole)


ATTENTION_NAMES = {
    "flash_1": Attention.FLASH_1,
    "flash_2": Attention.FLASH_2,
    "flash_3": Attention.VENDOR,
    "flex": Attention.FLEX,
}
"""Attention kernels by the names in `training.kernels.attention`."""
ATTENTION_SHARE = {
    (Attention.FLASH_2, "8"): 0.78,
    (Attention.FLASH_2, "9"): 0.50,
    (Attention.FLASH_2, "10"): 0.30,
    (Attention.VENDOR, "8"): 0.78,
    (Attention.VENDOR, "9"): 1.0,
    (Attention.VENDOR, "10"): 0.93,
}
"""Attention rate relative to matmuls, forward and backward together, by major compute capability. Source: Dao 2023,
table of A100, causal, d = 128: 180 of 312 TFLOP/s, on H100 up to 335 of 989 without a mask, 300 with; Shah et al. 2024
(FlashAttention 3): 550 to 600 forward, 450 to 500 backward of 4,096 tokens, 640 and 560 of 16,384. B200: 980 and 820
TFLOP/s of 4,096 tokens (SimuMax, configs/system/b200_bf16_ceperm.json, `sdp_fwd`, `sdp_bwd`; they count no mask)."""
RAMP = 1000
"""Sequence length at which a vendor's kernel on Hopper and later reaches half of its rate for long sequences: diagonal
blocks are computed in full, and loads are not hidden yet. Source: Shah et al. 2024, figures 5 and 6."""
OTHER_ATTENTION = 0.5
"""Attention rate on chips without a published figure (AMD, V100, consumer Blackwell): assumed."""
RELATIVE_TO_FLASH_2 = {Attention.FLASH_1: 1 / 1.8, Attention.FLEX: 0.86}
"""Rates relative to FlashAttention 2. Source: Dao 2023, section 4.1: version 2 is 1.7 to 3.0 times as fast as version
1, around 2, and 1.3 to 2.5 times as fast as Triton's. FlexAttention has 90 % of version 2 forward and 85 % backward
(PyTorch's blog of August 2024)."""
WIDE_HEAD = 128
"""Head width that the shares above were measured with."""
EXPONENTIALS = {Attention.FLASH_2: 0.11, Attention.VENDOR: 0.25}
"""Share of a kernel's time at head width 128 that depends on scores, not elements: each score has one exponential at
any width. Source: Shah et al. 2024, figures 5 and 6, 4,096 and 16,384 tokens on H100, heads of 64 and 128. Per FLOP,
narrow heads take 1.11 and 1.11 times as long with version 2, 1.25 and 1.22 with version 3, 1.26 with cuDNN; forward
counts once and backward 2.5 times."""


def attention_flops_per_s(cluster: Cluster, kernels: Kernels, length: float, head_dim: int = WIDE_HEAD) -> float:
    """FLOP per second of attention over sequences of this length.

    Counts: the rate of 16-bit matmuls times the kernel's share; times s / (s + 1000) for a vendor's kernel on Hopper
    and later; divided by 1 + f (128 / d - 1) for heads narrower than 128. Source: `ATTENTION_SHARE`, `RAMP`,
    `EXPONENTIALS`.
    """
    major = cluster.gpu.architecture.partition(".")[0]
    kind = Attention.FLASH_2 if kernels.attention in RELATIVE_TO_FLASH_2 else kernels.attention
    share = ATTENTION_SHARE.get((kind, major), OTHER_ATTENTION) * RELATIVE_TO_FLASH_2.get(kernels.attention, 1.0)
    if kind is Attention.VENDOR and major in ("9", "10"):
        share *= length / (length + RAMP)
    if head_dim < WIDE_HEAD:
        share /= 1 + EXPONENTIALS[kind] * (WIDE_HEAD / head_dim - 1)
    return matmul_flops_per_s(cluster) * share


@lru_cache(maxsize=4096)
def matmul_flops_per_s(cluster: Cluster, *, has_fp8: bool = False, has_fp4: bool = False) -> float:
    """FLOP per second of large matmuls. Raises: SpecError where the chip lacks the dtype.

    Counts: the dense peak times `efficiencies.matmul`; 16-bit floats are whichever kind the chip has.
    """
    rates = cluster.gpu.dense_flops_per_s
    dtypes = [ComputeDtype.FLOAT4] if has_fp4 else []
    dtypes += [ComputeDtype.FLOAT8] if has_fp8 or has_fp4 else []
    dtypes += [ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16]
    dtype = next((dtype for dtype in dtypes if dtype in rates), ComputeDtype.BFLOAT16)
    shares = cluster.efficiencies
    # profiles without a share for 8 bits use the one of 16 bits
    narrow = shares.matmul_8bit if dtype in (ComputeDtype.FLOAT8, ComputeDtype.FLOAT4) else None
    return cluster.gpu.flops_per_s(dtype) * (narrow or shares.matmul).value


def wave_share(num_rows: float, num_columns: float) -> float:
    """Share of a chip that a matmul with T x n outputs keeps busy.

    Counts: w / (w + 1/2), w = T n / `WAVE`; on average half of the last wave is empty. Source: NVIDIA, matrix
    multiplication background user's guide, wave quantization. Assumes: tiles of 128 x 256.

    >>> round(wave_share(8192, 4096), 3), round(wave_share(512, 2048), 3)
    (0.939, 0.327)
    """
    waves = num_rows * num_columns / WAVE
    return waves / (waves + 0.5)


def tile_share(num_rows: float) -> float:
    """Rate of an expert's matmul with this many rows, relative to large matmuls.

    Counts: r / (r + 192). Source: `LOST_ROWS`.

    >>> tile_share(192), tile_share(1728)
    (0.5, 0.9)
    """
    return num_rows / (num_rows + LOST_ROWS)
