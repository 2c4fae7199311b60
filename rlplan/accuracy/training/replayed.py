"""Updates of AgileRL that are replayed through torch's allocator: which they are, and what is replayed.

In: a Run. Out: bytes by kind, or None where the update is not of the kind that is replayed.
Left out: what the sleeping engine leaves (colocated.py), the order of the tensors (memory/trainers/replay.py).
"""

from collections.abc import Iterator

from rlplan.accuracy.training.colocated import num_updates
from rlplan.accuracy.training.run import Run
from rlplan.memory.model.block import FLOAT_BYTES, Block, Norm
from rlplan.memory.model.frozen import Frozen
from rlplan.memory.model.quantization import CODE_BYTES, NF4_DOUBLE, Quantization
from rlplan.memory.trainers.replay import ReplayedUpdate, replayed_peak
from rlplan.memory.trainers.replay_layer import HALF_BYTES, LayerSizes
from rlplan.memory.trainers.step_peak import MemorySnapshot
from rlplan.spec.model import Parameter
from rlplan.vocabulary import MemoryKind

ALL_LINEAR = Frozen(attention_inputs=3, adapts_output=True, mlp_inputs=2, adapts_down=True, adapter_bytes=FLOAT_BYTES)
"""Adapters in fp32 beside every linear layer."""
LONGEST = 8192
"""Tokens of a sequence that replays were held to. Longer responses may hold the padding token, which makes attention's
mask real: one of two updates of 32,768 tokens had 3.08 GiB more allocated, a mask of 1 GiB, 2 in bf16 and 0.09 of keys
and values repeated for it."""


def replayed_bytes(run: Run, rows_at_once: int) -> MemorySnapshot | None:
    """What the trainer's tensors take of the GPU when most is reserved, segments' gaps included.

    Counts: stored weights with their adapters; all else that is allocated at most; what is reserved beyond it.
    Source: memory/trainers/replay.py.
    """
    if run.adapters is None or run.adapters.lora is None or not is_replayed(run):
        return None
    stored = tuple(stored_tensors(run))
    layer = LayerSizes(
        run.layers[0].block,
        run.tokens.num,
        run.adapters.lora.rank,
        is_quantized=run.quantization is not None,
        has_bias=any(parameter.name.endswith("q_proj.bias") for parameter in run.model.parameters),
    )
    update = ReplayedUpdate(
        layer=layer,
        num_layers=run.layers[0].num,
        vocab_size=run.model.vocab_size,
        sequences=run.tokens.sequences,
        stored=stored,
        num_micro_batches=num_updates(run.settings),
        rows_at_once=rows_at_once,
    )
    peak, weights = replayed_peak(update), sum(stored)
    return {
        MemoryKind.WEIGHTS: weights,
        MemoryKind.ACTIVATIONS: peak.allocated - weights,
        MemoryKind.FRAGMENTATION: peak.reserved - peak.allocated,
    }


def is_replayed(run: Run) -> bool:
    """Whether all layers are attention and a gated MLP between two RMS norms, for which Liger has kernels, with
    adapters beside every linear layer, over bf16 or NF4.
    """
    if run.adapters is None or run.adapters.frozen != ALL_LINEAR or len(run.layers) != 1 or run.num_ranks > 1:
        return False
    block = run.layers[0].block
    plain = Block(block.hidden, block.num_heads, block.num_kv_heads, block.head_dim, block.intermediate, norm=Norm.RMS)
    return block == plain and run.quantization in (None, NF4_DOUBLE) and run.tokens.length <= LONGEST


def stored_tensors(run: Run) -> Iterator[int]:
    """Bytes of each tensor as it comes to the GPU: of each module its own, then its adapters, A before B and the
    policy's before the reference's.

    Source: PEFT 0.19 tuners/lora/layer.py, the order of a layer's children; bitsandbytes 0.50 `QuantState`.
    """
    beside: dict[str, list[Parameter]] = {}
    for adapter in run.adapters.parameters if run.adapters else ():
        beside.setdefault(adapter.name.split(".lora_")[0], []).append(adapter)
    copies = 2 if run.adapters and run.adapters.reference_bytes else 1
    scheme = None if run.quantization is None else Quantization(run.quantization)
    for parameter in run.model.parameters:
        if scheme is None or not scheme.covers(parameter):
            yield parameter.numel * (HALF_BYTES if scheme is None else FLOAT_BYTES)
        else:
            codes = parameter.numel // 2
            yield codes
            yield scheme.form.num_bytes(parameter.shape) - codes + CODE_BYTES
        for adapter in beside.get(parameter.name.removesuffix(".weight"), ()):
            yield from [adapter.numel * FLOAT_BYTES] * copies
