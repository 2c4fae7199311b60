"""Seconds of one step of a rollout engine: sequences that decode, and prompts that are prefilled with them.

In: EngineCounts, a Cluster. Out: seconds by resource. Left out: sampling with penalties or grammars, LoRA, draft
models, n-gram lookup on the host, the savings of sparse attention (the reads of its indexer count), differences between
ranks.

    step = max(matmuls + attention + elementwise + all-reduces + layers, launches) + host

Symbols: T tokens of a step, b decoding sequences, s their cached tokens together, L layers, t tp, B peak memory
bandwidth, F peak FLOP/s of matmuls, S bytes of a message.
"""

import math
from dataclasses import dataclass, replace

from rlplan.memory.serving.versions import ASYNC, LATEST, VllmVersion
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCounts, Matmuls
from rlplan.timing.training.mini_batch import largest_normal

BLEND = 3.0
"""A matmul takes (memory^BLEND + compute^BLEND)^(1/BLEND): near the ridge point, neither hides the other completely.
Values from 2 to 6 fit equally well (mean errors within 0.5 points)."""
CACHE_READS = 0.9
"""Share of peak memory bandwidth at which decode attention reads a long cache. Source: the kernel tables that
AIConfigurator 0.12 measured with vLLM 0.24 (`the tables` below): 0.93 on H100, 0.91 on H200, 0.9 on B200."""
HOPPER_READS_8BIT = 0.72
"""The same share for an 8-bit cache on Hopper. Source: the tables, 0.82 on H100, 0.65 on H200."""
PREFILL_ATTENTION = 0.65
"""Share of the 16-bit peak that attention reaches in the prefill of a long prompt, whatever the cache's format."""
ATTENTION_RAMP = 600
"""Additional keys that each query of a prefill seems to read: a prompt of P tokens reaches P / (P + 2 * ramp) of
PREFILL_ATTENTION.
Source of both: the tables, 0.21 at 512 tokens and 0.61 at 8,192 on H100, 0.15 and 0.49 on B200, 0.18 and 0.61 on
B300."""
KERNEL = {16: 3e-6, 8: 6e-6, 4: 7.5e-6}
"""Seconds of a matmul in a CUDA graph beyond its bytes and FLOPs, by the bits it multiplies in. Source: the tables,
1 to 64 tokens, Hopper and Blackwell: 2.7 to 3.7 us in 16 bits, 5.5 to 6.7 in 8, 7.2 to 8.4 in 4."""
NARROW = {8: 0.85, 4: 0.65}
"""Share of the peak of narrow matmuls relative to 16-bit ones, where a profile has none. Source: the tables, 0.75 to
0.96 in 8 bits on Hopper and Blackwell, 0.68 and 0.45 in 4 on B200 and B300."""
QUANTIZE = {8: 2e-12, 4: 0.3e-12}
"""Seconds to quantize one element of a narrow matmul's input. Source: the tables, the term that grows with tokens times
inputs: 1.9 to 2.3 ps in 8 bits on Hopper, Blackwell and RTX PRO 6000, 0.3 ps in 4 bits on B200."""
SUSTAINED = 1.15
"""Seconds of matmuls and attention in a loaded engine relative to isolated kernels, whose clocks are higher. Source:
prefill steps of Qwen3-32B on 1 to 8 B300 (vLLM 0.20.1, AIConfigurator's forward-pass metrics). Not used in the fit:
without it Llama-3.1-70B on B200 is 18 % off, with it 14 (benchmarks/constants)."""
EXPERT_MATMUL = {16: 0.45, 8: 0.2, 4: 0.25}
"""Share of the peak that experts' matmuls reach in a prefill with uneven routing. Source: the tables, medians over
models and ranks: 0.42 to 0.5 in 16 bits, 0.17 to 0.24 in fp8, 0.26 and 0.18 in nvfp4."""
MXFP4_EXPERTS = 0.45
"""The same with 4-bit weights and activations in mxfp8. Source: the tables, 0.45 and 0.49 on B200 and B300."""
SEQUENCE = 10e-6
"""Seconds per sequence of a step that nothing hides: sampler, batch preparation. Source: gpt-oss-120b on one B200 (vLLM
0.15), whose step grows by 5 to 10 us a sequence beyond bytes and FLOPs."""
LAUNCH = 0.5e-3
"""Seconds that the host takes to launch a layer without a CUDA graph, and again for unfused experts. Source:
Llama-3.1-70B on 4 and 8 B200, where 1024 prompt tokens cost 50 to 80 ms in every format. Not used in the fit:
Qwen3.6-35B-A3B on B300 takes 0.83 to 1 ms a layer (AIConfigurator's forward-pass metrics), Qwen3-32B on 8 B300 at most
0.27."""
CAPTURED = 512
"""Tokens of the largest captured step. Source: vLLM 0.32.0, `max_cudagraph_capture_size`."""
SERIAL, SERIAL_SEQUENCE = 1.3e-3, 34e-6
"""Seconds per step, and per sequence, that the GPU waits for the scheduler without asynchronous scheduling. Source:
Qwen3-32B in 16 bits on 2 to 8 H100 (vLLM 0.12), beyond the kernels. Not used in the fit: with the constants of two
GPUs, steps on eight are within 3 %, without them 8 %. Three settings in fp8 fit best without them."""

FUSED = 0.4
"""Fixed seconds of TensorRT-LLM's expert kernels relative to Triton's. Source: the tables, one token beyond its bytes:
11 to 23 us on Blackwell, 21 to 38 on Hopper (medians of formats)."""
SLOW_EXPERTS = 45e-6, 0.5
"""Seconds that a layer of CUTLASS's fp8 experts takes longer on Hopper than Triton's, and the share of their FLOP/s.
Source: the tables, 81 against 38 us for one token, 0.12 against 0.24 of the peak. Not used in the fit: vLLM pull
request 33490 calls DeepSeek-R1 with 16 requests `about 30 % slower`, which is 17 % here."""
SLOW_VERSIONS = (VllmVersion(0, 15), VllmVersion(0, 17))
"""First version with the slow default, and the first without. Assumes: 34260 (February 2026) came with 0.17."""

LOG_PROBS = (0.13e-3, 20e-6)
"""Seconds per step and per sequence to return the log-prob of each sampled token. Source: vLLM pull request 57442,
tokens per second of a 0.5B model with and without: 407 and 430 for 1 sequence, 13,583 and 18,645 for 64."""
NCCL_LATENCY = 12e-6
"""Seconds that a small NCCL all-reduce takes longer than one of vLLM's own kernels, which the profile's collective
latency was fitted to. Source: extrapolation to 0 bytes of times in CUDA graphs on H100, 0.5 to 4 MiB: 18 against
6 us on four (vLLM pull request 24532), 19 against 5 on six (24111). Assumes: the same on other GPUs."""

EIGHT_BIT_FORMS = ("fp8", "fp8-channel", "fp8-block")
_FALLBACKS = (ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16, ComputeDtype.FLOAT32)

Parts = tuple[float, float, float, float, float]
RESOURCES = (Resource.COMPUTE, Resource.MEMORY, Resource.LATENCY, Resource.DEVICE_LINK, Resource.HOST)
"""Resources of the five numbers of `Parts`, in order."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Work of one engine step."""

    num_seqs: float
    """Sequences that decode."""
    context_tokens: float
    """Cached tokens of all decoding sequences together."""
    prefill_tokens: float = 0.0
    """Prompt tokens that are prefilled."""
    prefill_pairs: float = 0.0
    """Pairs of a prompt token and a token before it."""
    num_prefills: float = 0.0
    """Prompts whose prefill ends in this step."""
    tokens_each: int = 1
    """Tokens per decoding sequence: one, plus its drafted tokens."""
    num_places: float = 0.0
    """Sequences that started together, of which `num_seqs` are left; 0 where finished ones are replaced."""
    num_prompts: float = 0.0
    """Prompts in progress; 0 where each ends in this step."""

    @property
    def num_decoded(self) -> float:
        """Tokens of the decoding sequences, all of which need logits."""
        return self.num_seqs * self.tokens_each


def expected_tokens(num_drafted: int, acceptance_rate: float) -> float:
    """Tokens that a sequence gains in one step of speculative decoding.

    Counts: (1 - a^(k+1)) / (1 - a): the drafts up to the first rejected one, plus one token of the model itself.
    Source: Leviathan 2023 (arXiv:2211.17192), equation 1. Assumes: each draft is accepted with the same probability,
    independent of earlier ones; a batch advances like its mean sequence.

    >>> expected_tokens(0, 0.5), expected_tokens(1, 0.5), expected_tokens(3, 0.5)
    (1.0, 1.5, 1.875)
    """
    return (1 - acceptance_rate ** (num_drafted + 1)) / (1 - acceptance_rate)


def find_compute_dtype(gpu: GpuProfile, form: str) -> ComputeDtype:
    """Find the compute type of a GPU for weights of a format.

    Counts: fp8 and int8 where the chip has them, NVFP4 as 4 bits, MXFP4 with 8-bit activations where the chip has 4
    bits. All other formats are widened to 16 bits first.
    """
    supported = gpu.dense_flops_per_s
    if form in EIGHT_BIT_FORMS and ComputeDtype.FLOAT8 in supported:
        return ComputeDtype.FLOAT8
    if form == "int8" and ComputeDtype.INT8 in supported:
        return ComputeDtype.INT8
    if form in ("nvfp4", "mxfp4") and ComputeDtype.FLOAT4 in supported:
        return ComputeDtype.FLOAT4 if form == "nvfp4" else ComputeDtype.FLOAT8
    return next((dtype for dtype in _FALLBACKS if dtype in supported), ComputeDtype.BFLOAT16)


def find_width(dtype: ComputeDtype) -> int:
    """Bits in which a matmul of a compute type multiplies."""
    return {ComputeDtype.FLOAT4: 4, ComputeDtype.FLOAT8: 8, ComputeDtype.INT8: 8}.get(dtype, 16)


def has_fused_experts(gpu: GpuProfile, form: str) -> bool:
    """Whether TensorRT-LLM's fused kernels compute the experts: for 4 bits on data-center Blackwell.

    Assumes: 8 bits use DeepGEMM or Triton there, as published recipes choose (vLLM pull request 37056).
    """
    return gpu.architecture.startswith("10.") and form in ("nvfp4", "mxfp4")


def has_slow_experts(gpu: GpuProfile, form: str, version: VllmVersion) -> bool:
    """Whether CUTLASS's slow kernels compute the experts."""
    first, last = SLOW_VERSIONS
    return gpu.architecture == "9.0" and form in EIGHT_BIT_FORMS and first <= version < last


@dataclass(frozen=True, slots=True)
class Wire:
    """Link between the ranks of an engine, and the all-reduce that uses it."""

    bytes_per_s: float
    """Bytes per second that a rank sends."""
    latency_s: float
    """Seconds of a small all-reduce."""
    reads_peers: bool = True
    """Whether vLLM's custom kernels reduce, which read the memory of other ranks; else NCCL does."""

    def time_all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of one all-reduce of a message.

        Counts: NCCL's reduce-scatter and all-gather in one kernel, c + 2*(t-1)/t * S/B. vLLM's kernels take the faster
        of one stage, where every rank reads all messages, c + (t-1)*S/B, and two, 2*c + 2*(t-1)/t * S/B.
        Source: vLLM 0.32.0 csrc/custom_all_reduce.cuh (one-stage, two-stage); Thakur 2005, section 4.

        >>> Wire(100e9, 10e-6).time_all_reduce(1e6, 2), round(Wire(100e9, 10e-6).time_all_reduce(1e6, 8) * 1e6, 2)
        (2e-05, 37.5)
        >>> round(Wire(100e9, 10e-6, reads_peers=False).time_all_reduce(1e6, 8) * 1e6, 2)
        27.5
        """
        transfer = 2 * (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s
        if not self.reads_peers:
            return self.latency_s + transfer
        one_round = self.latency_s + (num_ranks - 1) * num_bytes / self.bytes_per_s
        return min(one_round, 2 * self.latency_s + transfer)


def find_wire(cluster: Cluster, num_ranks: int, *, reads_peers: bool = True) -> Wire:
    """Find the link of a tensor-parallel group of neighbouring ranks.

    Counts: the device link inside a host, or PCIe without one; between hosts a GPU's share of the network. NCCL_LATENCY
    is added where vLLM's own kernels are off. Raises: SpecError where the profiles lack a rate.
    """
    gpu, small = cluster.gpu, cluster.serving.collective.value + (0.0 if reads_peers else NCCL_LATENCY)
    reach = cluster.gpus_in_link_domain
    if num_ranks > reach:
        shares = cluster.node_efficiencies
        rate = cluster.network_bytes_per_s * shares.network.value / cluster.gpus_per_host
        return Wire(rate, small + 2 * shares.network_latency.value, reads_peers)
    share = cluster.efficiencies.device_link
    pairs_only = cluster.node is not None and cluster.node.topology == "nvlink_pairs" and num_ranks > 2
    if gpu.device_link is not None and share is not None and not pairs_only:
        return Wire(gpu.device_link.bytes_per_s.value * share.value, small, reads_peers)
    host = gpu.host_link.bytes_per_s.value if gpu.host_link else 16e9
    return Wire(host * cluster.efficiencies.host_link.value, small, reads_peers)


class EngineRates:
    """Seconds of each part of a step on one rank.

    Everything that does not depend on the load is computed once, because a search asks for thousands of steps.
    """

    def __init__(
        self,
        counts: EngineCounts,
        cluster: Cluster,
        *,
        kv_element_bytes: int,
        has_graphs: bool = True,
        has_custom_all_reduce: bool = True,
        version: VllmVersion = LATEST,
        returns_log_probs: bool = False,
        has_ray_executor: bool = False,
        drafts: tuple[int, float] = (0, 0.0),
    ) -> None:
        self._drafted, self._gained = drafts[0], expected_tokens(*drafts)
        gpu, serving = cluster.gpu, cluster.serving
        peak, self._has_graphs = cluster.memory_bytes_per_s, has_graphs
        self._counts, self._bytes_per_s = counts, peak * serving.memory.value

        def find_peak(form: str) -> tuple[float, int]:
            dtype = find_compute_dtype(gpu, form)
            return gpu.flops_per_s(dtype) / SUSTAINED, find_width(dtype)

        def matmul(weights: Matmuls) -> tuple[float, float]:
            flops, width = find_peak(weights.form)
            share = {8: serving.matmul_8bit, 4: serving.matmul_4bit}.get(width, serving.matmul)
            flops *= share.value if share else serving.matmul.value * NARROW[width]
            self._layers += weights.num_kernels * KERNEL[width]
            self._token += weights.num_inputs * QUANTIZE.get(width, 0.0)
            return weights.num_bytes / self._bytes_per_s, 2 * weights.num_weights / flops

        self._token = counts.elementwise_bytes / self._bytes_per_s
        self._layers = counts.num_layers * serving.layer.value
        self._matmuls = [matmul(weights) for weights in counts.matmuls]
        self._head = matmul(counts.head)
        self._expert_read = self._expert_pair = 0.0
        num_unfused = 0
        if (experts := counts.experts) is not None:
            self._expert_read = experts.num_layers * experts.num_bytes / self._bytes_per_s
            flops, width = find_peak(experts.form)
            share = MXFP4_EXPERTS if experts.form == "mxfp4" and width == 8 else EXPERT_MATMUL[width]
            is_fused = has_fused_experts(gpu, experts.form)
            num_unfused = 0 if is_fused else experts.num_layers
            fixed = serving.expert_layer.value * (FUSED if is_fused else 1.0)
            if has_slow_experts(gpu, experts.form, version):
                fixed, share = fixed + SLOW_EXPERTS[0], share * SLOW_EXPERTS[1]
            self._expert_pair = 2 * experts.num_layers * experts.num_weights / (flops * share)
            self._layers += experts.num_layers * fixed
        attention = find_peak("")[0] * PREFILL_ATTENTION
        reads = HOPPER_READS_8BIT if kv_element_bytes == 1 and gpu.architecture == "9.0" else CACHE_READS
        self._caches = [
            (c.num_bytes / (peak * reads), c.flops / attention, c.prefill_flops / attention, c.window)
            for c in counts.caches
        ]
        self._sequence_state = counts.state_bytes / self._bytes_per_s
        has_wire = counts.num_collectives > 0
        self._wire = find_wire(cluster, counts.ranks, reads_peers=has_custom_all_reduce) if has_wire else None
        self._launches = (counts.num_layers + num_unfused) * LAUNCH
        all_ranks = counts.ranks * counts.replicas
        self._exchange = find_wire(cluster, all_ranks, reads_peers=False) if counts.replicas > 1 else None
        # Ray's executor refuses asynchronous scheduling (vLLM pull requests 25887, 29012; 36836 is off by default).
        is_serial = version < ASYNC or (has_ray_executor and all_ranks > 1)
        step_s, sequence_s = LOG_PROBS if returns_log_probs else (0.0, 0.0)
        self._step_host = step_s + (SERIAL if is_serial else 0.0)
        self._sequence_host = SEQUENCE + sequence_s + (SERIAL_SEQUENCE if is_serial else 0.0)
        is_inside = all_ranks <= cluster.gpus_in_link_domain
        self.link = Resource.DEVICE_LINK if is_inside else Resource.NETWORK

    def seconds(self, load: StepLoad) -> float:
        """Seconds of one step."""
        return sum(self.parts(load))

    def cost(self, load: StepLoad) -> Cost:
        """Cost of one step."""
        return make_cost(self.parts(load), self.link)

    def parts(self, load: StepLoad) -> Parts:
        """Seconds by resource, in the order of `RESOURCES`.

        With speculative decoding, a step verifies k + 1 tokens per sequence. The result is then per gained token.
        """
        if not self._drafted or not load.num_seqs or load.prefill_tokens:
            return self._step_parts(load)
        compute, memory, latency, link, host = self._step_parts(replace(load, tokens_each=1 + self._drafted))
        gained = self._gained
        return compute / gained, memory / gained, latency / gained, link / gained, host / gained

    def _step_parts(self, load: StepLoad) -> Parts:
        """Seconds by resource of one step.

        Counts: each matmul by the larger of its weight reads and its FLOPs (BLEND); experts that the tokens hit; the
        KV cache of each decoding sequence, at most its window; two all-reduces per layer; SEQUENCE per sequence; at
        least LAUNCH per layer without a CUDA graph. Among replicas that share experts, the one with the most work
        counts, plus a gather of all tokens and a reduction in each layer with experts.
        """
        all_tokens = load.num_decoded + load.prefill_tokens
        load = busiest_replica(load, self._counts.replicas)
        tokens = load.num_decoded + load.prefill_tokens
        compute, memory = self._matmul_parts(load, tokens, all_tokens)
        reading, attending = self._attention_parts(load)
        memory += reading + tokens * self._token + load.num_seqs * self._sequence_state
        compute += attending
        link = 0.0
        latency = self._layers
        if self._wire is not None:
            counts = self._counts
            size = tokens * counts.message_bytes
            whole = self._wire.time_all_reduce(size, counts.ranks)
            latency += counts.num_collectives * self._wire.latency_s
            link = counts.num_collectives * (whole - self._wire.latency_s)
        if self._exchange is not None and (experts := self._counts.experts) is not None:
            ranks, size = self._counts.ranks * self._counts.replicas, all_tokens * self._counts.message_bytes
            latency += 2 * experts.num_layers * self._exchange.latency_s
            link += experts.num_layers * (self._exchange.time_all_reduce(size, ranks) - self._exchange.latency_s)
        host = self._step_host + load.num_seqs * self._sequence_host
        if tokens > CAPTURED or not self._has_graphs:
            # the host launches ahead of the GPU, so only launch time beyond the GPU time is exposed
            host += max(0.0, self._launches - compute - memory - latency - link)
        return compute, memory, latency, link, host

    def _matmul_parts(self, load: StepLoad, tokens: float, all_tokens: float) -> tuple[float, float]:
        compute = memory = 0.0
        work = [(read, flop * tokens) for read, flop in self._matmuls]
        work.append((self._head[0], self._head[1] * (load.num_decoded + load.num_prefills)))
        if (experts := self._counts.experts) is not None:
            pairs = experts.pairs(all_tokens)
            work.append((self._expert_read * experts.slowest(all_tokens), self._expert_pair * pairs))
        for read, multiply in work:
            both = (read**BLEND + multiply**BLEND) ** (1 / BLEND)
            if read > multiply:
                memory += both
            else:
                compute += both
        return compute, memory

    def _attention_parts(self, load: StepLoad) -> tuple[float, float]:
        reading = attending = 0.0
        for read, flop, prefill_flop, window in self._caches:
            seen, pairs = load.context_tokens, load.prefill_pairs
            if window is not None:
                seen, pairs = min(seen, load.num_seqs * window), min(pairs, load.prefill_tokens * window)
            reading += max(read, flop * load.tokens_each) * seen
            attending += prefill_flop * (pairs + ATTENTION_RAMP * load.prefill_tokens)
        return reading, attending


def busiest_replica(load: StepLoad, replicas: int) -> StepLoad:
    """Load of the replica with the most work; all others wait for it in every layer with experts.

    Counts: each sequence and prompt belongs to one replica. Finished sequences are replaced on the emptiest replica,
    so shares are even, n = b / r. Without replacement, where a share p of all is left, counts have the deviation
    sqrt(n (1 - p)). The largest of r replicas exceeds n by this deviation times the largest of r normal numbers.
    Source: binomial; Blom 1958, as `ExpertMatmuls.slowest`.

    >>> busiest_replica(StepLoad(8, 800, 100, 5000, 1), 4) == StepLoad(2.0, 200.0, 100.0, 5000.0, 1.0)
    True
    >>> busiest_replica(StepLoad(1, 500), 8) == StepLoad(1.0, 500.0)  # the other replicas have no work
    True
    >>> left = busiest_replica(StepLoad(64, 6400, num_places=256), 4)  # 16 + 1.05 * sqrt(16 * 3/4)
    >>> round(left.num_seqs, 1), round(left.context_tokens)
    (19.6, 1963)
    """
    if replicas == 1:
        return load
    # fewer prompts than replicas: a prompt cannot be split
    share = max(1 / replicas, 1 / max(1.0, load.num_prompts or load.num_prefills))
    seqs = load.num_seqs / replicas
    if load.num_places > load.num_seqs:
        seqs += largest_normal(replicas) * math.sqrt(seqs * (1 - load.num_seqs / load.num_places))
    seqs = max(seqs, min(1.0, load.num_seqs))
    seqs = min(seqs, load.num_seqs, max(1.0, load.num_places / replicas) if load.num_places else load.num_seqs)
    return StepLoad(
        seqs,
        load.context_tokens * seqs / load.num_seqs if load.num_seqs else 0.0,
        load.prefill_tokens * share,
        load.prefill_pairs * share,
        load.num_prefills * share,
        load.tokens_each,
    )


def make_cost(parts: Parts, link: Resource = Resource.DEVICE_LINK) -> Cost:
    """Convert parts to a Cost without zero entries. link: the resource that all-reduces occupy."""

    resources = (link if resource is Resource.DEVICE_LINK else resource for resource in RESOURCES)
    return Cost({resource: seconds for resource, seconds in zip(resources, parts, strict=True) if seconds})
