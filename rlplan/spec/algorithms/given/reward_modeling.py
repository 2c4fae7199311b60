"""Reward modeling: the policy's model gets a scalar head and learns to score the chosen answer of a pair higher.

What comes out is a sequence classifier with one label: a reward model that `roles.reward.path` takes.
"""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="reward_modeling",
    source="Ouyang et al. 2022, arXiv:2203.02155, equation 1; Bradley and Terry 1952",
    advantage="best_against_worst",
    loss="ranking",
    given="pair",
    joins_rollouts=True,
    trains_scalar=True,
    defaults={"kl_coef": 0.0, "learning_rate": 1e-5},
)
