"""SFT: given answers are imitated, token by token; nothing is generated but for evaluation."""

from rlplan.spec.declaration import Algorithm

ALGORITHM = Algorithm(
    name="sft",
    source="Ouyang et al. 2022, arXiv:2203.02155, section 3.5; TRL's SFTTrainer with completion_only_loss",
    advantage="reward",
    loss="log_prob",
    given="answer",
    defaults={"kl_coef": 0.0, "token_weights": "token", "learning_rate": 1e-5},
)
