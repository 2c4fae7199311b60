"""The cluster that a point's words name: GPU, how many, the host they sit in, and what a variant of the GPU changes.

In: a point. Out: a Cluster. Raises CannotPredict where no profile has the GPU. Left out: networks that a source does
not state: the node is the first bundled one with this GPU, or with one of its generation.
"""

import re
from dataclasses import replace
from functools import cache

from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import CannotPredict
from rlplan.accuracy.settings import gpu_of
from rlplan.accuracy.training.settings import RunSettings, num_ranks
from rlplan.errors import SpecError
from rlplan.spec.base import shorten
from rlplan.spec.hardware.catalogue import get_gpu, get_node, load_profiles
from rlplan.spec.hardware.profile import GpuProfile, NodeProfile
from rlplan.timing.network.cluster import Cluster

USUAL_WATTS = {"h100-sxm": 700, "h200-sxm": 700, "a100-sxm-80gb": 400, "a100-sxm-40gb": 400, "b200": 1000}
"""Power limits as sold, to which a lower one in a GPU's name is compared. Source: NVIDIA's datasheets."""
LIMITED_WATTS = 700
"""Of a B200 that is said to be limited without a figure: a B100's, as which the only source of such points first names
its GPUs (torchao, prototype/mx_formats/README.md)."""
STATIC_WATTS = 100
"""Watts that do not follow the clock: leakage, memory, links. Assumed: an idle H100 draws 70 to 120 W."""
B300_PORTS = 0.5
"""Share of their adapters' 800 Gbit/s at which published runs on several DGX B300 exchange: what switches of 400 Gbit/s
give, as most of that time have. The sources name no switch. Read off gpt-oss-120b in three containers, twice by
gradients, once by experts' rows: alone they say 0.30, 0.31 and 0.39. Left out (benchmarks/constants/trainers.py), a
container's value errs by 7.5 to 10.1 % of the two others, 38.5 to 52.7 % without it."""
FAMILIES = ("h100", "h200", "h800", "h20", "a100", "a800", "b200", "b300", "gh200", "gb200", "mi300x", "mi325x")
"""Names that stand at the front of a longer description."""
USUAL_GPUS_PER_HOST = 8
"""Of a GPU that no bundled node has."""


def cluster_of(point: MeasuredPoint) -> Cluster:
    """The cluster of a point. Raises: CannotPredict."""
    gpu, settings = timed_gpu(point), RunSettings(point)
    count = num_ranks(settings)
    node = node_with(gpu.name) or get_node(_similar_node(gpu), where=point.id)
    in_host = settings.first(("gpus_per_host", "gpus_per_node"))
    usual = node.num_gpus if node else USUAL_GPUS_PER_HOST
    per_host = settings.count(in_host) if in_host else min(count, usual)
    if gpu.name == "b300" and node is not None:
        ports = int(node.network_bytes_per_s.value * B300_PORTS)
        rate = node.network_bytes_per_s.model_copy(update={"value": ports})
        node = node.model_copy(update={"network_bytes_per_s": rate})
    return Cluster(gpu, count, per_host, node)


def timed_gpu(point: MeasuredPoint) -> GpuProfile:
    """The profile of a point's GPU, with the memory rate and the power limit that its name states.

    Counts: the clock, and with it matmuls, falls with the cube root of the dynamic power: P ~ f V^2, V ~ f; on
    Blackwell in proportion, as if its voltage were the lowest. Source: CMOS power; an H100 SXM at 500 W of 700:
    (400 / 600)^(1/3) = 0.874; GB300 with 1,400 W is 1.2 times as fast as GB200 with 1,200 W, of the same peak
    (docs/decisions.md).
    """
    text = (point.gpu or "").lower()
    gpu = gpu_of(point) or _by_family(text)
    if gpu is None:
        raise CannotPredict(f"no profile of the GPU '{shorten(point.gpu)}'")
    changes: dict[str, object] = {}
    rate = re.search(r"(\d+(?:\.\d+)?)\s*tb/s", text)
    if rate and gpu.memory_bytes_per_s:
        stated = int(float(rate.group(1)) * 1e12)
        changes["memory_bytes_per_s"] = gpu.memory_bytes_per_s.model_copy(update={"value": stated})
    watts, usual = _watts(text), USUAL_WATTS.get(gpu.name)
    if watts and usual and gpu.efficiencies and watts < usual:
        dynamic = max(1, watts - STATIC_WATTS) / (usual - STATIC_WATTS)
        factor = dynamic if gpu.architecture.startswith("10.") else dynamic ** (1 / 3)
        rates = gpu.efficiencies
        slower = {
            name: share.model_copy(update={"value": share.value * factor})
            for name, share in (("matmul", rates.matmul), ("matmul_8bit", rates.matmul_8bit))
            if share
        }
        changes["efficiencies"] = rates.model_copy(update=slower)
    return gpu.model_copy(update=changes)


def _watts(text: str) -> int | None:
    """The power limit that a GPU's name states."""
    watts = re.search(r"(?<![\d.])(\d{2,4})\s*w(atts?)?\b", text)
    return int(watts.group(1)) if watts else LIMITED_WATTS if "power limited" in text else None


def _by_family(text: str) -> GpuProfile | None:
    """The profile of the family that a longer description names: `8x H100 96GB HBM2e`."""
    for word in sorted(FAMILIES, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", text):
            try:
                return get_gpu(word, where="gpu")
            except SpecError:
                return None
    return None


@cache
def node_with(gpu_name: str) -> NodeProfile | None:
    """The first bundled node with a GPU, its maker's own before a cloud's."""
    nodes = [profile for profile in load_profiles().values() if isinstance(profile, NodeProfile)]
    found = [node for node in nodes if node.gpu == gpu_name]
    return min(found, key=lambda node: (node.name.startswith("aws"), node.name), default=None)


SIMILAR_NODES = {"7": "dgx-1-v100-32gb", "8": "dgx-a100-80gb", "9": "dgx-h100", "10": "dgx-b200", "gfx942": "mi300x-8x"}
"""Whose network and host stand in for those of a GPU without a bundled node, by its architecture."""


def _similar_node(gpu: GpuProfile) -> str:
    """A GPU without links of its own sits in a host like that of an L40S."""
    if gpu.device_link is None or gpu.device_link.technology == "nvlink_bridge":
        return "l40s-8x"
    return SIMILAR_NODES.get(gpu.architecture.partition(".")[0], "mi300x-8x")


def with_ranks(cluster: Cluster, num_gpus: int) -> Cluster:
    """A part of a cluster."""
    return replace(cluster, num_gpus=num_gpus)
