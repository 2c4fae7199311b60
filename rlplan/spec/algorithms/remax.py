"""ReMax: REINFORCE whose baseline is the reward of the prompt's greedy answer: one more rollout each, never trained."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="remax",
    source="Li et al. 2023, arXiv:2310.10505, algorithm 1",
    advantage="greedy_baseline",
    loss="log_prob",
    num_baseline_samples=1,
    defaults={"kl_in": "reward", "kl_estimator": "k1"},
)
