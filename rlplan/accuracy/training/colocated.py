"""A trainer and a rollout engine that share one process: what NVML shows while one of them works and the other sleeps.

In: a point, its run. Out: bytes of what the engine leaves asleep, of the trainer beside its tensors, of generation.
Left out: trainers in processes of their own (points.py), engines of several ranks.

Source: AgileRL 2.8.2 algorithms/core/base.py (`_prepare_vllm_for_training`, `_backward_pass`, which steps after each
micro-batch), utils/llm_utils.py (`build_vllm_llm_init_kwargs`); its rig measures one rollout and one update by NVML's
`used`, which counts what the driver keeps (tools/memory_profiling/nvml.py).
"""

import re

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.settings import gpu_of, unit_bytes
from rlplan.accuracy.training.run import Run
from rlplan.accuracy.training.settings import SEQUENCE, RunSettings
from rlplan.memory.model.block import Block
from rlplan.memory.serving.engine import EngineMemory, EngineSettings, engine_memory
from rlplan.memory.serving.peaks import (
    RUNNER_SEGMENTS,
    freed_head_bytes,
    prefill_peak_bytes,
    sampler_peak_bytes,
)
from rlplan.memory.serving.versions import VllmVersion, parse_version
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.spec.model import ModelSpec
from rlplan.units import GIB, MIB, ceil_div
from rlplan.vocabulary import MemoryKind

FIRST_KERNELS = 100 * MIB
"""What the driver takes for kernels that are loaded when they first run, in the first generation and update.
Fitted to 187 generations of five models under AgileRL: 1.1 % mean error with it, 1.7 %
without. Left out, SmolLM2 has 0.5 % (1.1 without), Qwen2.5 0.5B 1.6 (2.5), 1.5B 0.9 (1.3), 7B 0.7 (1.0) and OLMoE 0.7
(0.5) by the others' 85 to 105 MiB. OLMoE's updates, which it was not fitted to: 1.1 % with it, 1.2 % without."""
TRITON_KERNELS = 80 * MIB
"""Kernels that Triton compiles: of attention for heads of two widths (Gemma 4: vLLM has no other backend for both), and
of experts. Fitted to 21 residuals of Gemma 4 E2B under vLLM 0.26: they are missed by 0.015 GiB on average, by 0.09
without it; 20 under 0.23 and 21 of OLMoE, left out, by 0.016 and 0.010 (0.09 and 0.09 without)."""
TOKENS_OF_A_SEQUENCE = 8192
"""Tokens of one pass for each sequence, at most; AgileRL's `resolve_vllm_max_num_batched_tokens`."""
RESIDUAL = "sleeping_engine_residual_gib"
UNFUSED_UP_TO = (5, 11)
"""The last version of transformers known to ask for grouped keys whatever the width of a head; 5.19 does not."""
FUSED_HEAD_DIM = 256
"""Flash attention's widest head; torch's other fused kernel takes no grouped keys."""


def num_updates(settings: RunSettings) -> int:
    """Optimizer steps of one update phase: one after every micro-batch. The first has no moments before it."""
    if settings.first(("group_size",)) is None:
        return 2
    rows = settings.count("group_size") * settings.count("n_prompts", settings.count("num_prompts", 1))
    return ceil_div(rows, settings.count("micro_batch_effective", settings.count("micro_batch", 1)))


def _is_after_2_8_0(run: Run) -> bool:
    word = run.settings.word("framework")
    return word.startswith("AgileRL") and not word.startswith("AgileRL 2.8.0")


def passes_mask(run: Run) -> bool:
    """Whether attention gets a mask of pairs, for which transformers copies keys and values for every query head.

    Assumes: AgileRL after 2.8.0 passes one where a micro-batch has several sequences, as its peaks of Gemma 4 say.
    Source: transformers 5.11 integrations/sdpa_attention.py (`use_gqa_in_sdpa`).
    """
    is_padded = run.settings.flag("padding")
    return is_padded or (_is_after_2_8_0(run) and run.tokens.sequences > 1)


def unfused_pairs(run: Run) -> int:
    """Pairs of tokens, times heads, of a layer for which transformers and torch have no fused attention; 0 for others.

    Counts: heads wider than 256 that share keys, where no mask is passed, in transformers 5.11 and before.
    Source: transformers pull request 46960. Assumes: other trainers than AgileRL where a micro-batch has one sequence;
    5.12 has the pull request.
    """
    settings, tokens = run.settings, run.tokens
    version = re.match(r"(\d+)\.(\d+)", settings.word("transformers"))
    if version is None or tuple(map(int, version.groups())) > UNFUSED_UP_TO:
        return 0
    is_agile = settings.word("framework").startswith("AgileRL")
    if passes_mask(run) or (tokens.sequences > 1 and not is_agile):
        return 0
    heads = [kind.block.num_heads for kind in run.layers
             if kind.block.head_dim > FUSED_HEAD_DIM and kind.block.num_kv_heads < kind.block.num_heads]  # fmt: skip
    return max(heads, default=0) * tokens.sequences * tokens.length**2


def outside_tensors(point: MeasuredPoint, run: Run, block: Block) -> dict[MemoryKind, int]:
    """What NVML shows in an update beside the trainer's tensors.

    Counts: what the engine left, as stated or predicted; kernels of the trainer; half of the largest tensor, for what a
    request finds free in torch's segments lies between nothing and all of it.
    """
    return {
        MemoryKind.PROCESS: asleep_bytes(point, run),
        MemoryKind.CONTEXT: FIRST_KERNELS,
        MemoryKind.FRAGMENTATION: run.tokens.num * _widest(run, block) // 2,
    }


def asleep_bytes(point: MeasuredPoint, run: Run) -> int:
    """What the engine left, as stated or predicted."""
    return int(run.settings.number(RESIDUAL, 0.0) * GIB) or sum(asleep_parts(point).values())


def _widest(run: Run, block: Block) -> int:
    """Bytes of a token in the widest tensor of a layer; an adapter's copy of its input in its own type."""
    e, experts = run.precision.compute, block.experts
    if experts is not None:
        return e * experts.top_k * max(2 * experts.width, block.hidden)
    adapted = run.adapters is not None and run.adapters.frozen.adapts_down
    return block.intermediate * max(e, run.adapters.frozen.adapter_bytes if run.adapters and adapted else 0)


def asleep_parts(point: MeasuredPoint) -> dict[str, int]:
    """What NVML shows while the engine sleeps, part by part. Raises: CannotPredict, SpecError.

    Counts: what the driver keeps, the context, kernels loaded in the profile run (TRITON_KERNELS where heads have two
    widths, or experts), captured graphs, what this version of vLLM keeps of experts' workspaces and of inputs, and
    segments of its small tensors.
    """
    gpu, memory, model = _gpu(point), engine_of(point), model_of(point)
    compiled = TRITON_KERNELS if model.global_attention or model.experts else 0
    return {
        "driver": gpu.kept_by_driver,
        "context": memory.context,
        "kernels": memory.non_torch + compiled,
        "graphs": memory.cuda_graphs,
        "workspaces": memory.kept_workspace,
        "buffers": memory.input_buffer,
        "segments": RUNNER_SEGMENTS,
    }


def engine_of(point: MeasuredPoint) -> EngineMemory:
    """The engine as AgileRL starts it: a sequence for each rollout of a group, adapters on. Raises: CannotPredict."""
    settings, gpu = RunSettings(point), _gpu(point)
    length = settings.required(SEQUENCE, "sequence length")
    num_seqs = settings.count("max_num_seqs", settings.count("group_size"))
    tokens = min(num_seqs * length, max(length, num_seqs * TOKENS_OF_A_SEQUENCE))
    engine = EngineSettings(
        gpu.memory.value,
        gpu_memory_utilization=settings.number("gpu_memory_utilization", 0.3, high=1.0),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=settings.count("max_num_batched_tokens", tokens),
        max_model_len=length,
        is_a100="a100" in gpu.name,
        has_lora=settings.first(("lora_rank",)) is not None,
        context_bytes=gpu.overheads.context.value,
        version=_version_of(settings),
    )
    return engine_memory(model_of(point), engine)


def _version_of(settings: RunSettings) -> VllmVersion:
    """The engine's version, which may stand among the words about the framework: `under colocated vLLM 0.23.0`."""
    stated = settings.word("vllm", settings.word("vllm_version"))
    return parse_version(stated or settings.word("framework").lower().rpartition("vllm")[2])


def _gpu(point: MeasuredPoint) -> GpuProfile:
    gpu = gpu_of(point)
    if gpu is None:
        raise CannotPredict("the GPU is not known, and with it the context that NVML counts")
    if gpu.nvml_memory is None:
        raise CannotPredict(f"what NVML counts for the driver of {gpu.name} is not known")
    return gpu


@predicts("sleeping_engine_residual")
def predict_asleep(point: MeasuredPoint) -> Prediction:
    """What NVML shows of a GPU whose engine sleeps, before the trainer's weights come."""
    unit, parts = unit_bytes(point), asleep_parts(point)
    return Prediction(sum(parts.values()) / unit, parts={name: size / unit for name, size in parts.items()})


@predicts("rollout_peak")
def predict_generation(point: MeasuredPoint) -> Prediction:
    """The most that NVML shows in a generation, the trainer offloaded.

    Counts: what the driver keeps and the context; the engine's fraction of the total, whose peak of the profile run
    was given back but for experts' workspaces; what was reserved while it loaded and holds no weights; its buffer of
    inputs; graphs where they are not of the fraction; kernels that are loaded now; and passes of prefill, or the
    sampler (`passing_bytes`).
    """
    settings, gpu, memory, unit = RunSettings(point), _gpu(point), engine_of(point), unit_bytes(point)
    prompt = settings.count("prompt", settings.count("prompt_len", memory.max_model_len // 4))
    model, version = model_of(point), _version_of(settings)
    profiled = prefill_peak_bytes(model, 1, memory.limits.max_num_batched_tokens, has_workspaces=True)
    given_back = max(profiled, memory.sampler_peak, memory.encoder_peak)
    passing = passing_bytes(version, model, memory, prompt)
    parts = {
        "driver": gpu.kept_by_driver,
        "context": memory.context,
        "engine": memory.requested - given_back,
        "unused": freed_head_bytes(version, model),
        "buffers": memory.input_buffer,
        "graphs": 0 if version.reserves_graphs(model) else memory.cuda_graphs,
        # vLLM's profile run skips attention, so its compiled kernels are loaded in the first generation.
        "kernels": FIRST_KERNELS + (TRITON_KERNELS if model.global_attention else 0),
        "passing": min(passing, given_back),
    }
    return Prediction(sum(parts.values()) / unit, parts={name: size / unit for name, size in parts.items()})


def passing_bytes(version: VllmVersion, model: ModelSpec, memory: EngineMemory, prompt: int) -> int:
    """Bytes that passes of one group's rollouts reserve beyond the cache. prompt: its tokens.

    Counts: the prompt's pass, or the sampler's. Rollouts of a group share their prompt's blocks (vLLM's prefix cache,
    on by default), so it is computed once and its last block anew. Where the cache has no room for all of them to their
    end, some are preempted, and computed anew when others have ended: as many tokens at once as the cache has beside
    the prompt, in segments beside those of the prompt's pass.
    Source: vLLM 0.32.0 v1/core/sched/scheduler.py (`_preempt_request`: by recomputation). Held to: SmolLM2 1.7B with 16
    rollouts of 4,096 tokens and room for 14,736, which held 0.9 and 1.2 GiB more than the prompt's pass takes.
    """
    most, num_seqs, length = memory.limits.max_num_batched_tokens, memory.limits.max_num_seqs, memory.max_model_len
    passes = [prompt + (num_seqs - 1) * memory.block_size]
    if memory.num_tokens < prompt + num_seqs * (length - prompt):
        passes.append(memory.num_tokens - prompt)
    prefills = sum(prefill_peak_bytes(model, 1, min(most, tokens), has_workspaces=True) for tokens in passes)
    return max(prefills, sampler_peak_bytes(version, model, num_seqs, num_seqs))
