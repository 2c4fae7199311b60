"""Weight sync over a slow link: the part that stops a side, and the part that travels in the background.

In: a model, a SyncSetup, a LinkSpec, the two clusters. Out: a LinkedSync. Left out: the link's own time
(slow_links.py), rollouts that travel back (thousandths of the weights), the first weight sync.

Trainers gather the weights and write them, they travel as files in shards, and engines load them. Gathering and loading
stop their side. With asynchronous generation the transfer stops nothing.
"""

from dataclasses import dataclass

from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.placement import LinkSpec
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.slow_links import Broadcast, plan_broadcast
from rlplan.timing.transfer.weight_sync import SyncSetup, sync_ends


@dataclass(frozen=True)
class LinkedSync:
    """Cost of a weight sync over a slow link."""

    stops: Cost
    """Gathering and loading, which stop their side."""
    travels: Cost
    """Transfer to all sites."""
    num_bytes: int
    """Bytes that each site receives."""
    tree: Broadcast
    """Tree of the transfer."""


def sync_over_link(
    model: ModelSpec, setup: SyncSetup, link: LinkSpec, training: Cluster, generation: Cluster
) -> LinkedSync:
    """Cost of one weight sync to engines at the other end of a slow link.

    Counts: both ends as in `weight_sync.sync_ends`; the transfer takes the link, or the slower disk at either end.
    Source: prime-rl's checkpoints over SHARDCAST (INTELLECT-2, arXiv 2505.07291). Assumes: files are written, sent and
    read at the same time, shard by shard.
    """
    ends = sync_ends(model, setup, training, generation)
    tree = plan_broadcast(link, ends.num_bytes)
    disk_s = ends.num_bytes / min(side.node_efficiencies.disk_bytes_per_s.value for side in (training, generation))
    travels = Cost({Resource.DISK: disk_s} if disk_s > tree.seconds else {Resource.NETWORK: tree.seconds})
    return LinkedSync(ends.gather + ends.load, travels, ends.num_bytes, tree)
