"""RLOO: REINFORCE on whole answers, the baseline being the mean reward of the prompt's other rollouts."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="rloo",
    source="Ahmadian et al. 2024, arXiv:2402.14740; the clipped ratio of whole answers as in TRL",
    advantage="leave_one_out",
    loss="answer_ratio",
    min_samples_per_prompt=2,
    defaults={"kl_in": "reward", "kl_estimator": "k1"},
)
