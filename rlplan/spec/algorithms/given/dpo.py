"""DPO: given pairs of a chosen and a rejected answer; nothing is generated but for evaluation. kl_coef is its beta."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="dpo",
    source="Rafailov et al. 2023, arXiv:2305.18290, equation 7",
    advantage="best_against_worst",
    loss="preference",
    given="pair",
    joins_rollouts=True,
    defaults={"kl_coef": 0.1},
)
