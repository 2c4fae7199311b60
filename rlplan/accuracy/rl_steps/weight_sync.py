"""Points of weight sync: seconds from a trainer's weights to engines that hold them.

In: a point, whose settings say who trains, how weights travel and on how many GPUs or nodes. Out: seconds.
Left out: fp8 and other formats into which weights are turned on the way.

Which software ran decides more than the wire does: SGLang behind verl takes pickled handles of each tensor, verl's
checkpoint engines send packed buckets in turn, without them each tensor travels alone, slime works bucket by bucket.
"""

import re
from dataclasses import replace

from rlplan.accuracy.named_models import model_of
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict, Prediction, Refusal, predicts
from rlplan.accuracy.settings import Settings, gpu_of
from rlplan.errors import SpecError
from rlplan.records import dataclass
from rlplan.spec.base import shorten
from rlplan.spec.hardware.catalogue import get_gpu, get_node, profile_paths
from rlplan.spec.hardware.profile import GpuProfile, NodeProfile
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.transfer.weight_sync import Loader, SyncSetup, SyncTransport, sync_cost

USUAL_GPUS_PER_NODE = 8
STATE_BYTES = 16
"""A trained parameter with its states: from it follows how many GPUs train where nobody says."""
SLIME_BUCKET, USUAL_BUCKET = 1 << 30, 512 << 20
USUAL_TP = 8
"""Ranks of an engine where the point does not say: a node."""
WORDS = (
    *("placement", "backend", "transport", "mode", "method", "engine", "checkpoint_engine", "trainer", "rollout"),
    *("framework", "gpus", "nodes", "tp", "gen_tp", "rollout_tp", "generation_tp"),
    *("lora", "lora_rank", "lora_r", "adapter", "adapters"),
)
"""Settings in whose words the software, the transport and the GPUs are looked for."""
UNIT = re.compile(r"(ms|s|sec|seconds|GB/s)\b")


@predicts("weight_sync_time")
def predict_sync(point: MeasuredPoint) -> Prediction | Refusal:
    """Seconds of one weight sync, or the bytes of the weights over them where a rate was measured."""
    found = UNIT.match(point.measured.unit.strip())
    if found is None:
        return Refusal(f"unit {shorten(point.measured.unit)} is no duration")
    model, setup = model_of(point), _setup(point)
    training, generation = _clusters(point, setup)
    seconds = sync_cost(model, setup, training, generation).seconds
    if found.group(1) == "GB/s":
        return Prediction(model.num_parameters * setup.element_bytes / seconds / 1e9)
    return Prediction(seconds * (1000 if found.group(1) == "ms" else 1))


@dataclass(frozen=True)
class _Words:
    """All that a point says in words, in one text, to look things up in."""

    text: str

    def has(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None

    def number(self, pattern: str) -> int | None:
        found = re.search(pattern, self.text)
        return int(found.group(1)) if found else None


def _words(point: MeasuredPoint) -> _Words:
    return _Words(f"{Settings(point).words_of(WORDS)} {point.gpu or ''} {point.source}".lower())


def _setup(point: MeasuredPoint) -> SyncSetup:
    words, settings = _words(point), Settings(point)
    training, generation = _ranks(point)
    is_megatron = words.has(r"trainer=megatron|slime|backend=megatron|megatron")
    setup = SyncSetup(
        transport=_transport(words),
        element_bytes=settings.element_bytes("dtype"),
        num_training=training,
        num_generation=generation or training,
        tp=words.number(r"(?:gen(?:eration)?|rollout)[ _-]*tp[ _=]*(\d+)")
        or words.number(r"\btp[ _=]*(\d+)")
        or USUAL_TP,
        trainer="megatron" if is_megatron else "fsdp2",
        same_devices=generation is None,
        loader=Loader.PICKLED if words.has("sglang") and not words.has("slime") else Loader.IN_PLACE,
        bucket_bytes=SLIME_BUCKET if words.has("slime") else USUAL_BUCKET,
        has_two_buckets=not words.has("slime"),
        loads=not settings.flag("no_ipc_load"),
    )
    if "checkpoint_engine" in settings and not settings.flag("checkpoint_engine"):
        setup = replace(setup, bucket_bytes=0)
    return replace(setup, tp=min(setup.tp, setup.num_generation))


def _transport(words: _Words) -> SyncTransport:
    if words.has(r"(backend|transport|mode|method|engine)=[^=]*(delta|sparse)"):
        return "delta"
    if words.has(r"(backend|transport|mode|method|engine)=[^=]*disk"):
        return "disk"
    if words.has(r"(lora|adapter)\w*=(?!false|none|0)"):
        raise CannotPredict("the bytes of adapters are not stated")
    if words.has(r"=[^=]*\b(ipc|naive|coloca)") or (
        words.has("slime") and not words.has(r"=[^=]*\b(nccl|distributed)")
    ):
        return "cuda_ipc"
    return "nccl"


def _ranks(point: MeasuredPoint) -> tuple[int, int | None]:
    """GPUs that train and that generate; None where both are the same, or nobody says that they are not."""
    words, settings = _words(point), Settings(point)
    if {"trainer_fsdp", "num_rollout"} <= point.settings.keys():
        return settings.count("trainer_fsdp"), settings.count("num_rollout")
    if found := re.search(r"(\d+)\s*\+\s*(\d+)\s*(nodes?)?", words.text):
        scale = USUAL_GPUS_PER_NODE if found.group(3) else 1
        return int(found.group(1)) * scale, int(found.group(2)) * scale
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*[a-z]", (point.gpu or "").lower()):
        total = int(found.group(1)) * int(found.group(2))
    else:
        total = words.number(r"(\d+)\s*x\s*[a-z]") or settings.count("num_gpus", 0, at_least=0) or _needed(point)
    if total > 1 and _transport(words) in ("nccl", "delta", "disk"):
        return total - total // 2, total // 2
    return total, None


def _needed(point: MeasuredPoint) -> int:
    """Whole nodes whose memory holds the states of training."""
    gpu, model = _gpu(point), model_of(point)
    nodes = -(-model.num_parameters * STATE_BYTES // (gpu.memory.value * USUAL_GPUS_PER_NODE))
    return int(nodes) * USUAL_GPUS_PER_NODE


def _clusters(point: MeasuredPoint, setup: SyncSetup) -> tuple[Cluster, Cluster]:
    gpu = _gpu(point)
    node = _node(gpu)
    per_host = node.num_gpus if node else USUAL_GPUS_PER_NODE
    return (
        Cluster(gpu, setup.num_training, per_host, node),
        Cluster(gpu, setup.num_generation, per_host, node),
    )


def _gpu(point: MeasuredPoint) -> GpuProfile:
    """The GPU, also from within words such as `H100 nodes (8x), IB`. Raises: CannotPredict."""
    if gpu := gpu_of(point):
        return gpu
    for word in re.findall(r"[a-z]+\d+[a-z]*", (point.gpu or "").lower()):
        try:
            return get_gpu(word, where=point.id)
        except SpecError:
            continue
    raise CannotPredict(f"no profile is known for '{shorten(point.gpu)}'")


def _node(gpu: GpuProfile) -> NodeProfile | None:
    """The first bundled node with this GPU."""
    wanted = re.compile(rf"^gpu: *{re.escape(gpu.name)} *$", re.MULTILINE)
    for name, path in profile_paths().items():
        if path.parent.name == "node" and wanted.search(path.read_text("utf-8")):
            return get_node(name, where=name)
    return None
