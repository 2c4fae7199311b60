"""PPO: a value model judges every token; the KL estimate is part of the rewards."""

from rlplan.spec.declaration import Algorithm
from rlplan.vocabulary import Role

ALGORITHM = Algorithm(
    name="ppo",
    source="Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155",
    trained_roles=(Role.POLICY, Role.VALUE),
    advantage="generalized",
    loss="clipped_ratio",
    defaults={"kl_in": "reward", "kl_estimator": "k1"},
)
