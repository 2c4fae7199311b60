"""GRPO: rewards are compared within the group of one prompt's rollouts; no value model."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="grpo",
    source="DeepSeekMath, arXiv:2402.03300, section 4.1",
    advantage="group_normalized",
    loss="clipped_ratio",
    min_samples_per_prompt=2,
)
