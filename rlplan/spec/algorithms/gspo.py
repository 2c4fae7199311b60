"""GSPO: one ratio a sequence, the geometric mean of its tokens', clipped to 1 - 3e-4 .. 1 + 4e-4."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="gspo",
    source="Zheng et al. 2025, arXiv:2507.18071",
    advantage="group_normalized",
    loss="sequence_ratio",
    min_samples_per_prompt=2,
    defaults={"kl_coef": 0.0, "clip_low": 3e-4, "clip_high": 4e-4},
)
