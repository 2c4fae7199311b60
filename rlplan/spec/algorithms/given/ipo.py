"""IPO: pairs as DPO has them; the margin of the chosen answer is drawn to 1 / (2 kl_coef), and not beyond."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="ipo",
    source="Azar et al. 2023, arXiv:2310.12036, equation 17",
    advantage="best_against_worst",
    loss="squared_preference",
    given="pair",
    joins_rollouts=True,
    defaults={"kl_coef": 0.1},
)
