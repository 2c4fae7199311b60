"""CpuEngine: seconds of the rollout engine (vLLM) on a host without a GPU, and of a weight sync
into it: full weights through vLLM's reload, or adapters into a LoRA slot.

In: a model, the engine's settings, its share of the host, requests. Out: a Cost. Left out: prefix caching of prompts
(only whole blocks are shared), differences in length, preemption. Source: vLLM 0.32.0, v1/worker/cpu_model_runner.py.

Symbols: R sequences, c concurrent ones, p prompt and r response tokens, W bytes of the matrices and the head, h hidden,
q query width, k key width, I MLP width; P parameters, e bytes per element, S bytes of the adapters.
"""

from dataclasses import dataclass
from functools import cached_property

from rlplan.memory.model.engine_base import find_engine_quantization, list_packed_tensors
from rlplan.memory.serving.generation import build_host_pool, kv_bytes_per_token
from rlplan.memory.weight_sync.packets import arena_bytes, plan_policy_packets
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob, ResolvedRollout
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.cpu.eager import FLOAT_BYTES, PassCounts, fresh_bytes, matrix_numel
from rlplan.timing.cpu.host import CpuHost, CpuShare
from rlplan.units import ceil_div
from rlplan.vocabulary import SyncContent, Transport


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts with `num_samples` responses each. All prompts have one length, and so have all responses."""

    num_prompts: int
    num_samples: int
    prompt_len: int
    response_len: int

    @property
    def num_sequences(self) -> int:
        """R: sequences in total."""
        return self.num_prompts * self.num_samples


@dataclass(frozen=True)
class CpuEngine:
    """One engine with its share of the host."""

    model: ModelSpec
    rollout: ResolvedRollout
    share: CpuShare

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices of all layers, in their stored format (4 bits where quantized)."""
        scheme = find_engine_quantization(self.rollout, None)
        packed = list_packed_tensors(self.model, scheme)
        whole = FLOAT_BYTES * matrix_numel(self.model)
        if scheme is None:
            return whole
        return whole + sum(scheme.form.num_bytes(tensor.shape) - FLOAT_BYTES * tensor.numel for tensor in packed)

    def count_concurrent(self, requests: Requests) -> int:
        """c: concurrent sequences, limited by the requests, max_num_seqs and the KV cache."""
        rollout = self.rollout
        # vLLM reserves one block as the null block
        blocks = build_host_pool(self.model, rollout).num_blocks(rollout.kv_cache_memory) - 1
        blocks_per_sequence = ceil_div(requests.prompt_len + requests.response_len, rollout.block_size)
        return max(1, min(requests.num_sequences, rollout.max_num_seqs, blocks // blocks_per_sequence))

    def cost(self, requests: Requests) -> Cost:
        """Seconds of all requests.

        Counts: R p prompt tokens in steps of at most max_num_batched_tokens, R rows of logits; then R (r - 1) tokens
        in steps of c. Each step reads the weights and its caches and has a fixed part; each prompt costs some Python.
        """
        c, count = self.count_concurrent(requests), requests.num_sequences
        prompts = count * requests.prompt_len
        num_prefills = ceil_div(prompts, self.rollout.max_num_batched_tokens)
        cost = self.step_cost(prompts / num_prefills, count / num_prefills, requests.prompt_len / 2).times(num_prefills)
        context = requests.prompt_len + requests.response_len / 2
        full_rounds, remainder = divmod(count, c)
        num_steps = requests.response_len - 1
        cost += self.step_cost(c, c, context).times(full_rounds * num_steps)
        if remainder:
            cost += self.step_cost(remainder, remainder, context).times(num_steps)
        latencies = self.share.host.latencies
        return cost + self.share.latency_cost(latencies.engine_request.value, requests.num_prompts)

    def step_cost(self, num_tokens: float, num_sequences: float, context_len: float) -> Cost:
        """Seconds of one step: `num_tokens` pass the layers, and each of `num_sequences` samples one token.

        Counts: FLOPs 2 matrices per token, 2 V h per sequence; W read once; keys and values of each sequence; fresh
        outputs q + 2k, q, h, 3I, h per layer.
        """
        model, latencies = self.model, self.share.host.latencies
        q, k = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        table = model.vocab_size * model.hidden_size
        flops = 2 * num_tokens * matrix_numel(model) + 2 * num_sequences * table
        cache = num_sequences * context_len * kv_bytes_per_token(model, FLOAT_BYTES)
        tokens = int(num_tokens)
        fresh = (
            fresh_bytes({q + 2 * k: 1}, tokens)
            + fresh_bytes({q: 1}, tokens)
            + fresh_bytes({model.hidden_size: 2}, tokens)
        )
        fresh += fresh_bytes({2 * model.intermediate_size: 1, model.intermediate_size: 1}, tokens)
        logits = fresh_bytes({model.vocab_size: 4}, int(num_sequences))
        counts = PassCounts(
            flops, model.num_layers * fresh + logits, self.matrix_bytes + FLOAT_BYTES * table + cache, 0
        )
        fixed = latencies.engine_step.value + model.num_layers * latencies.engine_layer.value
        fixed += num_sequences * latencies.engine_sequence.value
        return self.share.pass_cost(counts) + self.share.latency_cost(fixed)


def time_weight_sync(job: ResolvedJob, engine: CpuEngine, host: CpuHost, *, is_first: bool = False) -> Cost:
    """Seconds of a sync from the trainer's memory into the engine, with its call.

    The first sync needs two more calls to open the channel, and its arena consists of fresh pages.
    """
    sends_adapters = job.placement.sync_content is SyncContent.ADAPTER
    arena = arena_bytes(plan_policy_packets(job, engine.model)) if is_first else 0
    cost = (_adapters_cost if sends_adapters else _full_weights_cost)(job, engine, host, arena)
    if is_first or job.placement.sync_verification == "every":
        cost += (_adapters_verification_cost if sends_adapters else _verification_cost)(job, engine, host)
    return cost + Cost({Resource.LATENCY: host.latencies.call.value}).times(3 if is_first else 1)


def _full_weights_cost(job: ResolvedJob, engine: CpuEngine, host: CpuHost, arena: int) -> Cost:
    """Full weights through vLLM's layerwise reload. arena: bytes of the shared arena that are fresh.

    Counts: P e copied into the arena (2 P e read and written), read by both sides for checksums (2 P e); a fresh
    tensor for each parameter, copied (2 P e); a fresh packed copy of each matrix (twice its bytes); both tables packed
    again at the end. Source: vLLM 0.32.0 model_loader/reload; runtime/weight_sync/.
    """
    model, share = engine.model, engine.share
    whole = FLOAT_BYTES * model.num_parameters
    packed = engine.matrix_bytes + FLOAT_BYTES * 4 * model.vocab_size * model.hidden_size
    cost = share.touch_cost(6 * whole + 2 * packed) + share.fresh_cost(_count_fresh_bytes(model) + packed + arena)
    cost += share.latency_cost(host.latencies.reload_tensor.value, len(model.parameters))
    return cost + _transport_cost(job, engine, host, whole)


def _verification_cost(job: ResolvedJob, engine: CpuEngine, host: CpuHost) -> Cost:
    """Comparison of the engine's own parameters with the trainer's.

    Counts: another complete update, and the engine's weights read before and after it (2 P e).
    Source: runtime/weight_sync/engine_state.py. Left out: matmuls of packed matrices with 32 rows.
    """
    read = engine.share.touch_cost(2 * FLOAT_BYTES * engine.model.num_parameters)
    return read + _full_weights_cost(job, engine, host, 0)


def _adapters_cost(job: ResolvedJob, engine: CpuEngine, host: CpuHost, arena: int) -> Cost:
    """Adapters into a LoRA slot of vLLM through an in-memory file; base weights are not sent. arena: as above.

    Counts: S copied into the arena, read by both sides for checksums, copied out, written to the file and read from
    there into the slot (2 S each). The copy and the file are fresh. Each adapted layer is reloaded once.
    Source: runtime/weight_sync/contents/adapter.py.
    """
    adapters, share = job.adapter_parameters(engine.model), engine.share
    size = FLOAT_BYTES * sum(adapter.numel for adapter in adapters)
    cost = share.touch_cost(10 * size) + share.fresh_cost(2 * size + arena)
    cost += share.latency_cost(host.latencies.reload_tensor.value, len(adapters) // 2)
    return cost + _transport_cost(job, engine, host, size)


def _adapters_verification_cost(job: ResolvedJob, engine: CpuEngine, host: CpuHost) -> Cost:
    """Comparison of vLLM's LoRA slots with the trainer's adapters.

    Counts: S copied into the arena, read by both sides for checksums, copied out, laid out as in a slot and compared
    with the slot (2 S each). The copy and the layout are fresh.
    Source: runtime/weight_sync/adapter_state.py. Left out: the second comparison after one in which every B is zero.
    """
    share = engine.share
    size = FLOAT_BYTES * sum(adapter.numel for adapter in job.adapter_parameters(engine.model))
    return share.touch_cost(10 * size) + share.fresh_cost(2 * size) + _transport_cost(job, engine, host, size)


def _transport_cost(job: ResolvedJob, engine: CpuEngine, host: CpuHost, num_bytes: float) -> Cost:
    """Seconds that a transport other than shared memory adds to a sync.

    Counts: gloo sends the bytes and copies them into the reader's arena. Files are written into fresh pages of the
    page cache and read from there (four times the bytes).
    """
    transport, share = job.sync_transport, engine.share
    if transport is Transport.GLOO:
        sent = Cost({Resource.NETWORK: num_bytes / host.collective_bytes_per_s})
        return sent + share.touch_cost(2 * num_bytes)
    if transport is Transport.DISK:
        return share.touch_cost(4 * num_bytes) + share.fresh_cost(num_bytes)
    return NOTHING


def _count_fresh_bytes(model: ModelSpec) -> float:
    """Bytes of the parameters that are large enough to be mapped afresh."""
    return sum(fresh_bytes({parameter.numel: 1}, 1) for parameter in model.parameters)
