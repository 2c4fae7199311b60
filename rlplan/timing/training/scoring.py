"""Scoring: seconds of a forward pass that gives log-probs, values or rewards of all rollouts.

In: TrainSetting (of a trained role, or a frozen one with its own ranks), MiniBatchShape, a Cluster. Out: a Cost.
Left out: rewards by rule (they run on hosts), reloading an offloaded role (switches.py).
"""

from rlplan.timing.cost import Cost
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.training.mini_batch import MiniBatchShape, forward_cost
from rlplan.timing.training.settings import TrainSetting

__all__ = ["score_cost"]


def score_cost(setting: TrainSetting, mini_batch: MiniBatchShape, cluster: Cluster) -> Cost:
    """Seconds of one forward pass over `mini_batch`, with the gathers of ZeRO-3 where the role is sharded.

    Counts: a third of training's matmuls without recomputation, attention 1 of 3.5, one gather a pass.
    Source: Kaplan et al. 2020, section 2.1 (a backward pass is twice a forward pass).
    Assumes: micro-batches of the trainer's size; the policy's old log-probs, a reference, a value, a reward cost alike
    but for the head.
    """
    return forward_cost(setting, mini_batch, cluster)
