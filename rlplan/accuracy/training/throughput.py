"""Published training throughput: `throughput_train`, in tokens per second, seconds per step or a share of the peak.

In: a point. Out: what rlplan/timing says of it, in its own unit. Left out: loading of data, checkpoints, failures.
"""

import re
from dataclasses import replace
from typing import Any

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, predicts
from rlplan.accuracy.timed_hardware import USUAL_GPUS_PER_HOST, cluster_of
from rlplan.accuracy.training.run import Run, is_bridge, read_run
from rlplan.accuracy.training.settings import (
    ACCUMULATION,
    BATCH,
    RECOMPUTE,
    SEQUENCE,
    VIRTUAL_STAGES,
    RunSettings,
    num_ranks,
)
from rlplan.accuracy.training.trainers import AUTOMODEL, FOUNDRY, MEGATRON, PRIME_RL, TORCHTITAN, Trainer, trainer_of
from rlplan.dataflow.choice import TrainerChoice
from rlplan.memory.trainers.shape import Recompute
from rlplan.records import dataclass
from rlplan.spec.models.parts import NONE
from rlplan.spec.resolved import SettledTraining
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.flops import Lengths, attention_flops, head_flops, linear_flops
from rlplan.timing.training.kernels import EXPERTS_LAUNCHED, Attention, Kernels
from rlplan.timing.training.mini_batch import MiniBatchShape, train_cost
from rlplan.timing.training.optimizer import optimizer_cost
from rlplan.timing.training.settings import TrainSetting
from rlplan.vocabulary import Backend, Dtype, Loss, Role

GLOBAL_BATCH = ("global_batch", "global_batch_size", "gbs", "train_batch_size", "global_train_batch_size")
PAGEABLE = 2.9e9
"""Bytes a second of a blocking copy from a GPU into memory that is not pinned, tensor by tensor
(prime-rl copies each so). Fitted to what its steps of RL take longer than the same of SFT: 2.2, 2.9 and 3.1 GB/s of a
4B model on three kinds of GPU, 2.85 of a 30B one, so that either model alone gives the same. A 0.6B one, whose step is
mostly other work, says 1.0. Left out: 4B's rate errs by 3.7 %
of the six others, 30B's by 2.5 % of seven; 39 and 18 % without it."""
LAYER_WAITS = 11e-3
"""Seconds that prime-rl's host adds to a layer of each micro-batch, forward, again and backward: its attention reads
the longest sequence back from the device (transformers' FlashAttention without padding), so that launches hide behind
nothing. Experts add `EXPERTS_LAUNCHED`, as on Megatron. Fitted to dense models: 0.6B alone says 9e-3, 4B 12e-3.
Left out (benchmarks/constants/trainers.py): 0.6B's value errs by 4.2 % of the 31 others,
11.5 % without it."""
RL_TOKEN = 18e-6
"""Seconds of a token of a rank in prime-rl's RL: lengths of responses are found by comparing one position after the
other on the device, and each answer is read back (2026-02). Fitted: 0.6B alone says 19e-6, 4B 16e-6; left out, they err
by 2.7 and 3.1 % of the others, 9.4 and 12.5 % without it."""
BLACKWELL_EXPERTS = 39.0
"""Seconds of a step of prime-rl's mixtures on B200, beside all else. Not explained: the same of 106B in 46 layers and
of 235B in 94, of 16,384 and of 65,536 tokens, and not there on H100 and H200. INTELLECT-3 alone says 45, Qwen3-235B
38; left out, either errs by 10.1 and 4.1 % of the other's, 148 and 101 % without it."""
PRECISIONS = ("precision", "dtype", "fp8", "float8", "attn", "mode", "quant")
"""Settings that may name the type of the layers' matmuls."""
ULTRA = 300e9
"""Parameters beyond which a Nemotron 3 is Ultra."""
STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "no_shard": 0}
"""FSDP's words for ZeRO's stages."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of a published run."""

    setting: TrainSetting
    shape: MiniBatchShape
    num_sequences: int
    """Of all ranks."""
    length: int
    """Tokens of each sequence."""
    written_bytes: int = 0
    """Of weights that rank 0 writes to a file in every step."""
    beside_s: float = 0.0
    """What the trainer takes beside its passes."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.num_sequences * self.length

    def cost(self, cluster: Cluster) -> Cost:
        """Passes, the optimizer's step, and the file that one rank writes then."""
        done = train_cost(self.setting, self.shape, cluster) + optimizer_cost(self.setting, cluster)
        return done + _publishing_cost(self.written_bytes, cluster) + Cost({Resource.LATENCY: self.beside_s})


def _publishing_cost(num_bytes: int, cluster: Cluster) -> Cost:
    """Seconds until weights lie in a file: each tensor to the host, then all of them written, by one process."""
    disk = cluster.node_efficiencies.disk_bytes_per_s.value
    return Cost({Resource.HOST_LINK: num_bytes / PAGEABLE, Resource.DISK: num_bytes / disk}) if num_bytes else NOTHING


@predicts("throughput_train")
def predict_throughput(point: MeasuredPoint) -> Prediction:
    """Throughput of a published training run."""
    step, cluster = read_step(point), cluster_of(point)
    cost = step.cost(cluster)
    value = in_unit(point.measured.unit, step, cost.seconds, cluster)
    return Prediction(value, parts={part.value: value * s / cost.seconds for part, s in cost.parts.items() if s})


def in_unit(unit: str, step: Step, seconds: float, cluster: Cluster) -> float:
    """A step's throughput in the words of a source. Raises: CannotPredict.

    Model FLOPs are 6 P a token and causal attention; llm-foundry and PaLM count attention twice.
    """
    word = unit.lower().replace(" per ", "/").replace(" ", "")
    word = re.sub(r"sec(ond)?s?(?![a-z])", "s", word)
    each = cluster.num_gpus if re.search(r"/(gpu|device|chip|card|accelerator)", word) else 1
    if re.match(r"(k?tokens?|k?tok|tps|wps|words)", word):
        each = cluster.num_gpus if word.startswith("tps") and "total" not in word else each
        return step.num_tokens / seconds / each / (1000 if word.startswith("k") else 1)
    if re.match(r"(samples?|sequences?|seqs?)", word):
        return step.num_sequences / seconds / each
    if re.match(r"(ms|millis)", word):
        return 1000 * seconds
    if re.match(r"s(/|$)", word):
        return seconds
    flops = model_flops(step) / seconds / cluster.num_gpus
    if re.match(r"p?tflop|teraflop", word):
        return flops / 1e12
    if "mfu" in word or (word.startswith("%") and "peak" in word):
        return 100 * flops / cluster.flops_per_s(Dtype.BFLOAT16)
    raise CannotPredict(f"unit {unit!r} is no throughput that is known")


def model_flops(step: Step) -> float:
    """Model FLOPs of a step: three forward passes."""
    model, length = step.setting.model, step.length
    a_token = linear_flops(model) + head_flops(model)
    return 3 * step.num_sequences * (a_token * length + attention_flops(model, Lengths(length, length**2)))


def read_step(point: MeasuredPoint) -> Step:
    """The step of a published run. Raises: CannotPredict where a setting that decides its time is missing."""
    run = read_run(with_usual(point))
    if run.quantization is not None or (run.adapters is not None and run.adapters.lora is None):
        raise CannotPredict(
            "time of training beside packed weights, or with other adapters than LoRA, is held to no point"
        )
    settings, model_ranks = run.settings, run.tp * run.pp * run.cp * run.ulysses
    groups = max(1, run.num_ranks // model_ranks)
    local = settings.first(BATCH)  # torchtitan cuts it over the stages of a pipeline
    sequences = _num_sequences(run, settings.count(local) if local else run.tokens.sequences, groups)
    setting = _setting(run)
    length = run.tokens.length
    head = length if setting.loss is not Loss.NONE else 0
    publishes = run.trainer.publishes_weights and "rl" in re.findall(r"[a-z]+", settings.word("task").lower())
    written = run.precision.compute * run.model.num_parameters if publishes and run.adapters is None else 0
    beside = _beside_prime_rl(run, sequences / groups, is_rl=publishes) if run.trainer is PRIME_RL else 0.0
    shape = MiniBatchShape(sequences, length, length**2, length, head)
    return Step(setting, shape, sequences, length, written, beside)


def _beside_prime_rl(run: Run, sequences: float, *, is_rl: bool) -> float:
    """Seconds of a step of prime-rl beside its kernels; sequences: of a rank."""
    experts = run.model.experts
    layers = LAYER_WAITS * run.model.num_layers + EXPERTS_LAUNCHED * (len(experts.layers) if experts else 0)
    seconds = layers * sequences / run.tokens.sequences
    if is_rl:
        seconds += RL_TOKEN * sequences * run.tokens.length
    is_blackwell = "b200" in run.settings.gpu.lower()
    return seconds + (BLACKWELL_EXPERTS if experts and is_blackwell else 0.0)


def with_usual(point: MeasuredPoint) -> MeasuredPoint:
    """A point with what its kind leaves out: a pipeline's micro-batch is one sequence; recomputation may stand in
    `mode`, and is none where tables of throughput are silent and the trainer has no other default."""
    usual: dict[str, Any] = {}
    read = RunSettings(point)
    if read.first(BATCH) is None and read.degree("pp", "pipeline_parallel") > 1:
        usual["micro_batch"] = 1
    if read.first(BATCH) is None and "micro_batch" not in usual and (key := read.first(GLOBAL_BATCH)):
        steps = read.first(ACCUMULATION)
        ranks = _ranks_of(read)
        usual["micro_batch"] = max(1, read.count(key) // ranks // (read.count(steps) if steps else 1))
    if read.first(SEQUENCE) is None and (length := trainer_of(point).length):
        usual["seq"] = length
    mode = str(read.raw("mode") or "").lower()
    if read.first(RECOMPUTE) is None and "recompute" in mode:
        usual["recompute"] = mode
    if read.first(RECOMPUTE) is None and trainer_of(point) is TORCHTITAN and read.degree("ep") > 1:
        usual["recompute"] = "full"  # its llama4_17bx16e.toml
    if read.raw("ep") is None and "deepep" in read.word("kernels").lower():
        usual["ep"] = num_ranks(read)  # a dispatcher among ranks with different experts
    for key, value in usual.items():
        read.assume(key, value)
    return point.model_copy(update={"settings": point.settings | usual})


def _ranks_of(settings: RunSettings) -> int:
    degree = settings.degree("tp", "tensor_parallel") * settings.degree("cp", "context_parallel")
    return max(1, num_ranks(settings) // degree)


def _num_sequences(run: Run, micro_batch: int, groups: int) -> int:
    """Sequences of an optimizer step: the global batch, else micro-batches times ranks times accumulation."""
    settings = run.settings
    key = settings.first(GLOBAL_BATCH)
    if key and settings.count(key) >= groups:
        return settings.count(key)
    steps = settings.first(ACCUMULATION)
    return micro_batch * groups * (settings.count(steps) if steps else run.trainer.micro_batches)


def _setting(run: Run) -> TrainSetting:
    settings, trainer = run.settings, run.trainer
    choice = TrainerChoice(
        zero_stage=_zero_stage(run),
        gradient_checkpointing=run.recompute is Recompute.FULL,
        offloads_optimizer=run.offloads_states,
        offloads_parameters=False,
        micro_batch=run.tokens.sequences,
        ulysses=run.ulysses,
        tp=run.tp,
        pp=run.pp,
        cp=run.cp,
        ep=run.ep,
    )
    logits = {Loss.FUSED: "fused", Loss.CHUNKED: "chunked"}.get(run.loss, "plain")
    if run.is_compiled or trainer is MEGATRON:
        logits = "in_place"
    if trainer is PRIME_RL:  # operator by operator; in RL taken anew in the backward pass
        logits = "by_rows" if run.loss is Loss.COMPILED_ROWS else "plain"
    lora = run.adapters.lora if run.adapters else None
    shares_rows = run.tp == 1 or run.splits_sequence
    training = SettledTraining.model_validate({"logits": logits, "lora": lora, "sequence_parallel": shares_rows})
    backend: Backend = "megatron" if trainer is MEGATRON else "fsdp2"
    kernels = kernels_for(trainer, settings, run)
    return TrainSetting(run.model, Role.POLICY, training, choice, run.num_ranks, backend, kernels)


def _attention(settings: RunSettings) -> Attention:
    """Flash attention 3 and cuDNN's, or FlexAttention, where they are named, else 2, which torch runs."""
    key = settings.first(("attn", "attention", "attn_implementation", "kernels"))
    word = str(settings.raw(key)).lower() if key else ""
    if re.search(r"flex\W?att", word):
        return Attention.FLEX
    return Attention.VENDOR if re.search(r"fa\W?[34]|flash\w*[ _]?[34]|cudnn", word) else Attention.FLASH_2


def _zero_stage(run: Run) -> int:
    settings = run.settings
    if key := settings.first(("zero_stage", "zero", "stage")):
        return settings.count(key, at_least=0)
    sharding = str(settings.raw("sharding") or settings.raw("sharding_strategy") or "").lower()
    if sharding in STAGES:
        return STAGES[sharding]
    if run.trainer is MEGATRON:
        if settings.first(("fsdp",)) and settings.count("fsdp", at_least=0) > 1:
            return 3
        is_distributed = settings.says("distributed_optimizer", "use_distributed_optimizer")
        return int(bool(is_distributed or is_bridge(settings) or "distributed" in settings.word("optimizer").lower()))
    if run.replicates or run.num_ranks == 1:
        return 0
    return 3 if run.trainer.is_sharded or "fsdp" in settings else 0


def _megatron_kernels(kernels: Kernels, settings: RunSettings, run: Run) -> Kernels:
    """Megatron's. Megatron-Bridge's recipes send a token to a host once (HybridEP, DeepEP), let experts' rows travel
    beside another micro-batch from container 26.06 on, or where stages are interleaved and experts lie on several x86
    hosts, and have CUDA graphs on GB200 and GB300, on x86 hosts from 26.04 on where there is no pipeline. Of hybrids
    Megatron-Core overlaps nothing, and their graphs leave experts out. Source: Megatron-Bridge
    src/megatron/bridge/perf_recipes (2026-08)."""
    has_recipe = is_bridge(settings)
    container = tuple(int(part) for part in re.findall(r"\d+", settings.word("container"))[:2])
    is_grace = re.search(r"gb\d00", settings.gpu.lower()) is not None
    is_hybrid = NONE in run.model.attention_kinds
    virtual = settings.degree(*VIRTUAL_STAGES)
    hides = container >= (26, 6) or (not is_grace and virtual > 1 and run.ep > USUAL_GPUS_PER_HOST)
    dispatcher, graphs = settings.word("dispatcher").lower(), settings.word("cuda_graphs").lower()
    hides = "overlap" in dispatcher if dispatcher else hides
    has_graphs = has_recipe and (is_grace or (container >= (26, 4) and run.pp == 1))
    has_graphs = re.search("moe|full", graphs) is not None if graphs else has_graphs
    return replace(
        kernels,
        is_fused=True,
        modules=run.modules,
        attention=Attention.VENDOR,
        virtual_stages=virtual,
        reduce_bytes=2 if has_recipe else 4,
        main_gradient_bytes=4 if has_recipe else 8,
        predicts_ahead=_predicted_ahead(settings, run) if has_recipe else (0, 0),
        sends_once=re.search("hybrid|deep", dispatcher) is not None if dispatcher else has_recipe,
        hides_experts=has_recipe and hides and not is_hybrid,
        waits_per_expert_layer=0.0 if has_graphs and not is_hybrid else EXPERTS_LAUNCHED,
    )


def _predicted_ahead(settings: RunSettings, run: Run) -> tuple[int, int]:
    """Tokens that a recipe of Megatron-Bridge predicts ahead, and layers for each: one of DeepSeek-V3 unless its note
    says `w/o MTP`; of Nemotron 3 Super one, of Ultra two, by an attention layer and experts. Source: Megatron-Bridge
    models/deepseek/deepseek_v3_bridge.py (as `num_nextn_predict_layers`), perf_recipes/nemotronh (2026-08).
    """
    experts, word = run.model.experts, settings.word("note").lower()
    if re.search(r"w/o mtp|without mtp|no mtp", word) or experts is None:
        return 0, 0
    if run.model.architecture == "DeepseekV3ForCausalLM":
        return 1, 1
    if NONE in run.model.attention_kinds and experts.latent_size:
        return (2 if run.model.num_parameters > ULTRA else 1), 2
    return 0, 0


def kernels_for(trainer: Trainer, settings: RunSettings, run: Run) -> Kernels:
    """Kernels of a published run: Triton's first flash attention in llm-foundry, stored scores in Megatron of 2022."""
    words = " ".join(str(settings.raw(key)).lower() for key in PRECISIONS)
    has_fp8 = bool(settings.says("float8", "fp8")) or re.search(r"fp8(?! false)|float8", words) is not None
    kernels = Kernels(
        is_fused=run.is_compiled,
        has_fp8=has_fp8,
        has_fp4="fp4" in words,
        recompute=run.recompute,
        attention=_attention(settings),
        hides_step=not settings.word("overlap").lower().startswith("none"),
    )
    if trainer is FOUNDRY:
        return replace(kernels, is_fused=True, attention=Attention.FLASH_1)
    if trainer is AUTOMODEL:
        words = settings.word("kernels")
        once = "deepep" in words.lower()
        runs = replace(kernels, is_fused="TE" in words.split(), sends_once=once, has_neighbours=True)
        return replace(runs, waits_per_expert_layer=EXPERTS_LAUNCHED)
    if trainer is PRIME_RL:
        return replace(kernels, scatters_rows=True, reduce_bytes=4)
    if trainer is TORCHTITAN:
        hides = bool(settings.says("async_tp")) or "async" in settings.word("tp_comm").lower()
        interleaved = "interleaved" in str(settings.raw("schedule") or settings.raw("pp_schedule")).lower()
        kernels = replace(kernels, virtual_stages=2 if interleaved else 1)
        kernels = replace(kernels, reduce_bytes=4, hides_tp=hides, has_plain_rotary=True, repeats_keys=True)
        by_row, by_block = re.search(r"row-?_?wise", words) is not None, "mx" in words
        kernels = replace(kernels, orders_rows=True, gathers_8bit=has_fp8 and not (by_row or by_block))
        casts = 5 if by_row else 3 if by_block else 0
        return replace(kernels, scatters_rows=True, scales_rows=by_row, weight_casts=casts)
    if trainer is MEGATRON and run.model.architecture == "GPT2LMHeadModel":  # its papers came before FlashAttention
        virtual = settings.degree(*VIRTUAL_STAGES)
        return replace(kernels, is_fused=True, stores_scores=True, attention=Attention.FLASH_2, virtual_stages=virtual)
    return _megatron_kernels(kernels, settings, run) if trainer is MEGATRON else kernels
