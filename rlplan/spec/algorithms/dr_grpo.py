"""Dr.GRPO: GRPO without dividing by length or deviation, which favour long wrong answers and extreme prompts."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="dr_grpo",
    source="Liu et al. 2025, arXiv:2503.20783",
    advantage="group_centred",
    loss="clipped_ratio",
    min_samples_per_prompt=2,
    defaults={"kl_coef": 0.0, "token_weights": "constant"},
)
