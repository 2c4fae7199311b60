"""CISPO: the weight of a token is clipped, never its gradient: rare tokens keep their gradient."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="cispo",
    source="MiniMax-M1, arXiv:2506.13585, section 3.1; clip_high from Khatri et al. 2025, arXiv:2510.13786 (5 = 1 + 4)",
    advantage="group_normalized",
    loss="clipped_weight",
    min_samples_per_prompt=2,
    defaults={"kl_coef": 0.0, "clip_high": 4.0, "token_weights": "token"},
)
