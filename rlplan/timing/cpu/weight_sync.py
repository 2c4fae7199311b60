"""Seconds of a weight sync on a CPU host: full weights through vLLM's reload, or adapters into a LoRA slot.

In: a job, its model, the engine's share of the host. Out: a Cost. Left out: the number of engines, waiting.

Symbols: P parameters, e bytes per element, S bytes of the adapters.
"""

from rlplan.memory.weight_sync.packets import arena_bytes, plan_policy_packets
from rlplan.spec.model import ModelSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cost import NOTHING, Cost, Resource
from rlplan.timing.cpu.eager import FLOAT_BYTES, fresh_bytes
from rlplan.timing.cpu.engine import CpuEngine
from rlplan.timing.cpu.host import CpuHost
from rlplan.vocabulary import SyncContent, Transport


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
