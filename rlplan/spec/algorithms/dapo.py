"""DAPO: GRPO with a higher upper clip, zero-variance groups replaced by new ones (dynamic sampling), and every token
counted alike.

Its penalty that grows before a response is cut off takes `algorithm.overlong_buffer`, in tokens of the job's own limit.
"""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="dapo",
    source="Yu et al. 2025, arXiv:2503.14476",
    advantage="group_normalized",
    loss="clipped_ratio",
    min_samples_per_prompt=2,
    defaults={"kl_coef": 0.0, "clip_high": 0.28, "token_weights": "token", "max_refills": 3},
)
