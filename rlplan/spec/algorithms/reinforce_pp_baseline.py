"""REINFORCE++ with a baseline: rewards less their group's mean, normalized over the batch; KL as k2 in the loss."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="reinforce++_baseline",
    source="Hu 2025, arXiv:2501.03262, section 3.3",
    advantage="group_centred_batch_normalized",
    loss="clipped_ratio",
    min_samples_per_prompt=2,
    defaults={"kl_estimator": "k2", "token_weights": "token"},
)
