"""Online DPO: a prompt's best and worst rollout are the pair; zero-variance groups have no pair."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="online_dpo",
    source="Guo et al. 2024, arXiv:2402.04792, algorithm 1; the pair is ranked by reward instead of a judge",
    advantage="best_against_worst",
    loss="preference",
    min_samples_per_prompt=2,
    joins_rollouts=True,
    defaults={"kl_coef": 0.1},
)
