"""KTO: given answers that were judged good or bad, one of a prompt is enough; kl_coef is its beta."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="kto",
    source="Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8",
    advantage="reward",
    loss="unpaired_preference",
    given="unpaired",
    joins_rollouts=True,
    defaults={"kl_coef": 0.1},
)
