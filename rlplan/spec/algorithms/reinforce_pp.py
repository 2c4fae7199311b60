"""REINFORCE++: every token's rewards to come, KL among them, normalized over the whole batch; any number of samples."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="reinforce++",
    source="Hu 2025, arXiv:2501.03262",
    advantage="batch_normalized",
    loss="clipped_ratio",
    defaults={"kl_in": "reward", "kl_estimator": "k1", "token_weights": "token"},
)
