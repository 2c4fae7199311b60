"""Weight sync over a slow link: what it stops, and what travels while both sides go on.

In: a model, a SyncSetup, a LinkSpec, the two clusters. Out: a LinkedSync. Left out: the link's own time
(slow_links.py), rollouts that travel back (thousandths of the weights), the first weight sync.

Weights are gathered and written by the trainers, travel as files in shards, and are taken in by the engines. Gathering
and loading stop their side; a transfer stops nothing where generation is asynchronous.
"""

from dataclasses import dataclass

from rlplan.spec.model import ModelSpec
from rlplan.spec.parts.placement import LinkSpec
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.network.slow_links import Broadcast, broadcast
from rlplan.timing.transfer.weight_sync import SyncSetup, sync_ends


@dataclass(frozen=True)
class LinkedSync:
    """A weight sync over a slow link."""

    stops: Cost
    """Of gathering and loading."""
    travels: Cost
    """Of the transfer to all places."""
    num_bytes: int
    """That each place receives."""
    tree: Broadcast
    """How they reach all places."""


def sync_over_link(
    model: ModelSpec, setup: SyncSetup, link: LinkSpec, training: Cluster, generation: Cluster
) -> LinkedSync:
    """One weight sync to engines beyond a slow link.

    Counts: both ends as in `weight_sync.sync_ends`; the transfer is the link's, or of the slower disk at either end.
    Source: prime-rl's checkpoints over SHARDCAST (INTELLECT-2, arXiv 2505.07291). Assumes: files are written, sent and
    read at the same time, shard by shard.
    """
    ends = sync_ends(model, setup, training, generation)
    tree = broadcast(link, ends.num_bytes)
    disk_s = ends.num_bytes / min(side.node_efficiencies.disk_bytes_per_s.value for side in (training, generation))
    travels = Cost({Resource.DISK: disk_s} if disk_s > tree.seconds else {Resource.NETWORK: tree.seconds})
    return LinkedSync(ends.gather + ends.load, travels, ends.num_bytes, tree)
