"""Every loss and its gradient on live DeepSpeed, recomputed with plain torch from the papers' formulas.

Each answer is a forward pass of its own, without packing; nothing of rlplan is called. The trainer cuts the same
mini-batch into passes, and shares it out over its ranks, as in a run.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import make_job
from tests.runtime.live.live_losses import EVERY, NUM_DUMMIES
from tests.runtime.live.live_ranks import exercise

pytestmark = pytest.mark.engine

NUM_GROUPS, GROUP_SIZE, MAX_RESPONSE = 4, 4, 8
BOUND = 1e-5


@dataclass
class Answer:
    """One rollout: numbers of its n learned tokens, those of the policy with gradient."""

    group: int
    reward: float
    greedy_reward: float
    has_failed: bool
    policy: Tensor
    entropy: Tensor
    values: Tensor
    old: Tensor
    sampled: Tensor
    reference: Tensor
    teacher: Tensor
    old_values: Tensor
    distribution: Tensor
    """Log-probs of all tokens at each learned one, [n, V], with gradient."""
    teacher_distribution: Tensor

    def __len__(self) -> int:
        return len(self.policy)


Loss = Callable[[list[Answer]], Tensor]


@cache
def load_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(make_job().policy.path, dtype=torch.float32)


@cache
def make_teacher() -> tuple[Any, str]:
    """The policy's model with noise on its weights, and the folder that it is saved in."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_job().policy.path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    folder = tempfile.mkdtemp(prefix="rlplan-teacher-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(make_job().policy.path, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)
    return model, folder


def compute_plainly(row: dict[str, Any], model: Any = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probs, entropies, hidden states, distributions) of the tokens that the policy chose in an answer."""
    tokens = torch.tensor([row["prompt"] + row["response"]])
    output = (model or load_model())(tokens, output_hidden_states=True)
    observed = {place for start, end in row["observed"] for place in range(start, end)}
    chosen = [place for place in range(len(row["response"])) if place not in observed]
    places = torch.tensor(chosen, dtype=torch.long) + len(row["prompt"]) - 1
    distribution = output.logits[0, places].log_softmax(-1)
    words = torch.tensor([row["response"][place] for place in chosen], dtype=torch.long)
    logprobs = distribution.gather(1, words[:, None])[:, 0]
    entropies = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropies, output.hidden_states[-1][0, places], distribution


@cache
def draw_rows(kind: str) -> list[dict[str, Any]]:
    """A step of 16 answers with numbers near the policy's own. kind: `sampled`, `pair` or `labelled`.

    One answer is empty, one has failed, of one the last tokens are masked, and one has an environment's observation.
    """
    generator, rows = torch.Generator().manual_seed(11), []
    for index in range(NUM_GROUPS * GROUP_SIZE):
        length = 0 if index == 6 and kind == "sampled" else 1 + (5 * index + index // 4) % MAX_RESPONSE
        row: dict[str, Any] = {
            "group": index // GROUP_SIZE,
            "prompt": [5, 6, 7][: 1 + index % 3],
            "response": [3 + (index + 2) * (place + 1) % 9 for place in range(length)],
            "observed": [[1, 2]] if index == 3 else [],
            "has_failed": index == 9 and kind == "sampled",
            "num_ignored": 2 if index in (5, 9) and kind == "sampled" else 0,
            "reward": float(torch.rand((), generator=generator) * 2 - 0.7),
            "greedy_reward": 0.3 + index // GROUP_SIZE,
        }
        if kind != "sampled":
            row["group"] = index // 2
            row["reward"] = (1.0, -1.0)[index % 2] if kind == "pair" else ((1.0, -1.0)[index // 2 % 2], 0.0)[index % 2]
        with torch.no_grad():
            own = compute_plainly(row)[0]
        offset = -0.5 if index % 2 else 0.0
        scales = {"policy": 0.4, "reference": 0.5, "teacher": 0.8}
        scores = {name: own + scale * torch.randn(len(own), generator=generator) for name, scale in scales.items()}
        scores["reference"] = scores["reference"] + offset
        scores["value"] = torch.randn(len(own), generator=generator)
        row["sampled"] = (scores["policy"] + 0.6 * torch.randn(len(own), generator=generator)).tolist()
        row["scores"] = {name: values.tolist() for name, values in scores.items()}
        rows.append(row)
    return rows


def read_answers(rows: list[dict[str, Any]]) -> tuple[list[Answer], Tensor]:
    """The answers with the policy's numbers of today, and the value head that they were judged with."""
    head = torch.arange(load_model().config.hidden_size, dtype=torch.float32) / NUM_DUMMIES - 1
    head.requires_grad_()
    answers = []
    for row in rows:
        logprobs, entropies, states, distribution = compute_plainly(row)
        with torch.no_grad():
            teacher = compute_plainly(row, make_teacher()[0])[-1]
        count = 0 if row["has_failed"] else len(logprobs) - row["num_ignored"]
        noted = {"old": row["scores"]["policy"], "sampled": row["sampled"], "old_values": row["scores"]["value"]}
        noted |= {name: row["scores"][name] for name in ("reference", "teacher")}
        numbers = {name: torch.tensor(values[:count]) for name, values in noted.items()}
        own = {"policy": logprobs[:count], "entropy": entropies[:count], "values": (states @ head)[:count]}
        own |= {"distribution": distribution[:count], "teacher_distribution": teacher[:count]}
        facts = {name: row[name] for name in ("group", "reward", "greedy_reward", "has_failed")}
        answers.append(Answer(**facts, **own, **numbers))
    return answers, head


def average_answers(answers: list[Answer], losses: list[Tensor]) -> Tensor:
    """GRPO, equation 3: 1/G sum over answers of 1/|o_i| sum over tokens."""
    return torch.stack([each.mean() if len(each) else each.sum() for each in losses]).sum() / len(answers)


def average_tokens(answers: list[Answer], losses: list[Tensor]) -> Tensor:
    """DAPO, equation 8."""
    return torch.cat(losses).mean()


def divide_by_longest(answers: list[Answer], losses: list[Tensor]) -> Tensor:
    """Dr.GRPO: a constant in place of the length."""
    return torch.cat(losses).sum() / (len(answers) * MAX_RESPONSE)


def judge_by_group(
    answers: list[Answer], judge: Callable[[Tensor, Tensor], Tensor], rewards: list[Tensor] | None = None
) -> list[Tensor]:
    """One advantage an answer. judge: (an answer's reward, all rewards of its group); without a reward it is 0."""
    totals = rewards or [torch.tensor(answer.reward) for answer in answers]
    advantages = []
    for answer, reward in zip(answers, totals, strict=True):
        peers = [t for a, t in zip(answers, totals, strict=True) if a.group == answer.group and not a.has_failed]
        advantages.append(torch.tensor(0.0) if answer.has_failed else judge(reward, torch.stack(peers)))
    return advantages


def normalize(reward: Tensor, peers: Tensor) -> Tensor:
    return (reward - peers.mean()) / (peers.std() + 1e-6)


def centre(reward: Tensor, peers: Tensor) -> Tensor:
    return reward - peers.mean()


def leave_one_out(reward: Tensor, peers: Tensor) -> Tensor:
    return reward - (peers.sum() - reward) / (len(peers) - 1)


def whiten_tokens(rows: list[Tensor]) -> list[Tensor]:
    every = torch.cat(rows)
    return [(row - every.mean()) / (every.var() + 1e-8).sqrt() for row in rows]


def rewards_with_kl(answer: Answer, coefficient: float) -> Tensor:
    """r_t: the reward at the last token, less the k1 estimate of the policy before the step (Ouyang et al. 2022)."""
    rewards = -coefficient * (answer.old - answer.reference)
    return torch.cat([rewards[:-1], rewards[-1:] + answer.reward])


def rewards_to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    return (
        torch.stack(
            [
                sum((gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))), torch.tensor(0.0))
                for t in range(len(rewards))
            ]
        )
        if len(rewards)
        else rewards
    )


def clip(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO, equation 7, as a loss."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(answer: Answer) -> Tensor:
    apart = answer.reference - answer.policy
    return apart.exp() - apart - 1


def surrogate(
    answers: list[Answer],
    advantages: list[Tensor],
    *,
    low: float = 0.2,
    high: float = 0.2,
    weigh: Callable[[Answer], Tensor] = lambda answer: torch.ones(len(answer)),
) -> list[Tensor]:
    """Per token: weight of engine against trainer (without gradient) times PPO's clipped loss."""
    return [
        weigh(answer) * clip((answer.policy - answer.old).exp(), advantage, low, high)
        for answer, advantage in zip(answers, advantages, strict=True)
    ]


def grpo(answers: list[Answer]) -> Tensor:
    losses = surrogate(answers, judge_by_group(answers, normalize))
    penalized = [loss + 0.3 * k3(answer) for loss, answer in zip(losses, answers, strict=True)]
    return average_answers(answers, penalized)


def grpo_with_entropy(answers: list[Answer]) -> Tensor:
    losses = surrogate(answers, judge_by_group(answers, normalize))
    return average_answers(answers, [loss - 0.2 * a.entropy for loss, a in zip(losses, answers, strict=True)])


def dr_grpo(answers: list[Answer]) -> Tensor:
    return divide_by_longest(answers, surrogate(answers, judge_by_group(answers, centre)))


def dapo(answers: list[Answer]) -> Tensor:
    return average_tokens(answers, surrogate(answers, judge_by_group(answers, normalize), high=0.28))


def cispo(answers: list[Answer]) -> Tensor:
    """MiniMax-M1, equation 4, with an upper bound of 1.5."""
    advantages = judge_by_group(answers, normalize)
    losses = [
        -(a.policy - a.old).exp().clamp(max=1.5).detach() * advantage * a.policy
        for a, advantage in zip(answers, advantages, strict=True)
    ]
    return average_tokens(answers, losses)


def gspo(answers: list[Answer], weigh: Callable[[Answer], Tensor] | None = None) -> Tensor:
    """GSPO, equations 5 to 7; a weight of tokens multiplies their gradients in the ratio."""
    losses = []
    for answer, advantage in zip(answers, judge_by_group(answers, normalize), strict=True):
        apart = answer.policy - answer.old
        if weigh is not None:
            apart = apart.detach() + weigh(answer) * (apart - apart.detach())
        ratio = (apart.sum() / max(1, len(answer))).exp()
        losses.append(clip(ratio, advantage, 0.1, 0.15).expand(len(answer)))
    return average_answers(answers, losses)


def rloo(answers: list[Answer]) -> Tensor:
    """RLOO on whole answers, their reward less the KL (k1); clipped as one action. An empty answer's ratio is 1."""
    totals = [torch.tensor(a.reward) - 0.1 * (a.old - a.reference).sum() for a in answers]
    advantages = judge_by_group(answers, leave_one_out, totals)
    losses = [clip((a.policy - a.old).sum().exp(), advantage) for a, advantage in zip(answers, advantages, strict=True)]
    return torch.stack(losses).sum() / len(answers)


def reinforce_plus_plus(answers: list[Answer]) -> Tensor:
    advantages = whiten_tokens([rewards_to_go(rewards_with_kl(a, 0.1)) if len(a) else a.old for a in answers])
    return average_tokens(answers, surrogate(answers, advantages))


def reinforce_plus_plus_baseline(answers: list[Answer]) -> Tensor:
    values = judge_by_group(answers, centre)
    advantages = whiten_tokens([value.expand(len(a)) for a, value in zip(answers, values, strict=True)])
    losses = surrogate(answers, advantages)
    penalized = [x + 0.3 * (a.policy - a.reference) ** 2 / 2 for x, a in zip(losses, answers, strict=True)]
    return average_tokens(answers, penalized)


def remax(answers: list[Answer]) -> Tensor:
    losses = [
        -(rewards_to_go(rewards_with_kl(a, 0.1)) - a.greedy_reward) * a.policy if len(a) else a.policy for a in answers
    ]
    return average_answers(answers, losses)


def ppo(answers: list[Answer]) -> Tensor:
    """GAE (gamma 0.95, lambda 0.9), whitened; the value loss of openai/baselines, clipped at 0.2, times 0.5."""
    gamma, lam = 0.95, 0.9
    advantages, value_losses = [], []
    for answer in answers:
        rewards, values = (rewards_with_kl(answer, 0.1) if len(answer) else answer.old), answer.old_values
        following = torch.cat([values[1:], torch.zeros(min(1, len(values)))])
        errors = rewards + gamma * following - values
        advantages.append(rewards_to_go(errors, gamma * lam))
        returns = advantages[-1] + values
        near = values + (answer.values - values).clamp(-0.2, 0.2)
        value_losses.append(torch.maximum((answer.values - returns) ** 2, (near - returns) ** 2) / 2)
    losses = surrogate(answers, whiten_tokens(advantages))
    return average_answers(answers, [x + 0.5 * v for x, v in zip(losses, value_losses, strict=True)])


def margins(answers: list[Answer]) -> list[Tensor]:
    return [(answer.policy - answer.reference).sum() for answer in answers]


def dpo(answers: list[Answer]) -> Tensor:
    """Rafailov et al., equation 7. Even answers are chosen, odd ones rejected."""
    each = margins(answers)
    pairs = torch.stack([each[i] - each[i + 1] for i in range(0, len(each), 2)])
    return -torch.nn.functional.logsigmoid(0.3 * pairs).mean()


def ipo(answers: list[Answer]) -> Tensor:
    each = [margin / len(answer) for margin, answer in zip(margins(answers), answers, strict=True)]
    pairs = torch.stack([each[i] - each[i + 1] for i in range(0, len(each), 2)])
    return ((pairs - 1 / (2 * 0.3)) ** 2).mean()


def online_dpo(answers: list[Answer]) -> Tensor:
    """A group's best against its worst answer; failed ones are out."""
    each, losses = margins(answers), []
    for group in range(NUM_GROUPS):
        members = [i for i, a in enumerate(answers) if a.group == group and not a.has_failed]
        best, worst = (pick(members, key=lambda i: answers[i].reward) for pick in (max, min))
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (each[best] - each[worst])))
    return torch.stack(losses).mean()


def kto(answers: list[Answer]) -> Tensor:
    """Ethayarajh et al., equations 7 and 8: even answers are labelled, odd ones belong to other prompts."""
    each = margins(answers)
    z = torch.stack(each[1::2]).mean().clamp(min=0).detach()
    assert z > 0, "at 0 the bound would hide differences"
    signs = torch.tensor([answer.reward for answer in answers[::2]])
    return (1 - torch.sigmoid(0.3 * signs * (torch.stack(each[::2]) - z))).mean()


def sft(answers: list[Answer]) -> Tensor:
    return -torch.cat([answer.policy for answer in answers]).mean()


def distillation(answers: list[Answer]) -> Tensor:
    """Reverse KL of sampled tokens: a policy gradient with reward -(log p - log q), corrected by the clipped ratio."""
    losses = surrogate(answers, judge_by_group(answers, normalize))
    teacher = [
        ((a.policy - a.old).exp().clamp(max=1.2) * (a.policy - a.teacher)).detach() * (1 + a.policy - a.policy.detach())
        for a in answers
    ]
    return average_answers(answers, [x + 0.7 * t for x, t in zip(losses, teacher, strict=True)])


def distillation_over(top_k: int | None) -> Loss:
    """KL(policy || teacher) over all words, or over the teacher's k likeliest and the rest as one word."""

    def compute(answers: list[Answer]) -> Tensor:
        losses = surrogate(answers, judge_by_group(answers, normalize))
        for index, answer in enumerate(answers):
            own, other = answer.distribution.exp(), answer.teacher_distribution.exp()
            if top_k is not None:
                places = other.topk(top_k).indices
                own, other = own.gather(1, places), other.gather(1, places)
                own, other = (torch.cat([each, 1 - each.sum(1, keepdim=True)], 1) for each in (own, other))
            losses[index] = losses[index] + 0.7 * (own * (own / other).log()).sum(1)
        return average_answers(answers, losses)

    return compute


def dual_clip(answers: list[Answer]) -> Tensor:
    """Ye et al. 2020, equation 5, with c = 1.3."""
    losses = []
    for answer, advantage in zip(answers, judge_by_group(answers, normalize), strict=True):
        loss = clip((answer.policy - answer.old).exp(), advantage)
        losses.append(torch.minimum(loss, -1.3 * advantage) if advantage < 0 else loss)
    return average_answers(answers, losses)


def unbiased_kl(estimator: str, *, is_weighed: bool = False) -> Loss:
    """DeepSeek-V3.2: each estimate times the ratio, here also times the engine's truncated weight."""

    def compute(answers: list[Answer]) -> Tensor:
        weigh = truncated_tokens if is_weighed else lambda answer: torch.ones(len(answer))
        losses = surrogate(answers, judge_by_group(answers, normalize), weigh=weigh)
        for index, a in enumerate(answers):
            apart, ratio = a.policy - a.reference, (a.policy - a.old).exp()
            kl = {"k1": apart, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[estimator]
            losses[index] = losses[index] + 0.3 * weigh(a) * kl * (ratio.detach() if estimator == "k2" else ratio)
        return average_answers(answers, losses)

    return compute


def truncated_tokens(answer: Answer) -> Tensor:
    """Yao et al. 2025: min(p_old / b, 1.5) for each token."""
    return (answer.old - answer.sampled).exp().clamp(max=1.5)


def masked_tokens(answer: Answer) -> Tensor:
    """IcePop with its bounds."""
    ratio = (answer.old - answer.sampled).exp()
    return torch.where((ratio < 0.5) | (ratio > 5), torch.zeros(()), ratio)


def truncated_sequence(answer: Answer) -> Tensor:
    return (answer.old - answer.sampled).sum().exp().clamp(max=2.0).expand(len(answer))


def masked_sequence(answer: Answer) -> Tensor:
    """TRL's `sequence_mask` at 3."""
    ratio = (answer.old - answer.sampled).sum().exp()
    return (ratio if ratio <= 3 else torch.zeros(())).expand(len(answer))


def masked_mean(answer: Answer) -> Tensor:
    """The geometric mean of an answer's ratios, within 0.8 and 1.25."""
    ratio = (answer.old - answer.sampled).sum().div(max(1, len(answer))).exp()
    return (ratio if 0.8 <= ratio <= 1.25 else torch.zeros(())).expand(len(answer))


def veto_answers(answer: Answer) -> Tensor:
    """Truncated tokens; an answer with a token below 0.4 counts nothing."""
    is_out = bool(((answer.old - answer.sampled).exp() < 0.4).any())
    return torch.zeros(len(answer)) if is_out else (answer.old - answer.sampled).exp().clamp(max=2.0)


def weigh_grpo(weigh: Callable[[Answer], Tensor]) -> Loss:
    """Decoupled PPO (Hilton et al. 2021): behaviour weight times proximal clip, in GRPO's mean."""
    return lambda answers: average_answers(answers, surrogate(answers, judge_by_group(answers, normalize), weigh=weigh))


def weigh_cispo(answers: list[Answer]) -> Tensor:
    advantages = judge_by_group(answers, normalize)
    losses = [
        -masked_sequence(a) * (a.policy - a.old).exp().clamp(max=5).detach() * advantage * a.policy
        for a, advantage in zip(answers, advantages, strict=True)
    ]
    return average_tokens(answers, losses)


CASES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "grpo": (grpo, {"kl_coef": 0.3}),
    "grpo with an entropy bonus": (grpo_with_entropy, {"kl_coef": 0, "entropy_coef": 0.2}),
    "dr_grpo": (dr_grpo, {"name": "dr_grpo"}),
    "dapo": (dapo, {"name": "dapo", "max_refills": 0}),
    "cispo": (cispo, {"name": "cispo", "clip_high": 0.5}),
    "gspo": (gspo, {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15}),
    "rloo": (rloo, {"name": "rloo", "kl_coef": 0.1}),
    "reinforce++": (reinforce_plus_plus, {"name": "reinforce++", "kl_coef": 0.1}),
    "reinforce++_baseline": (reinforce_plus_plus_baseline, {"name": "reinforce++_baseline", "kl_coef": 0.3}),
    "remax": (remax, {"name": "remax", "kl_coef": 0.1}),
    "ppo": (ppo, {"name": "ppo", "kl_coef": 0.1, "gamma": 0.95, "gae_lambda": 0.9, "value_coef": 0.5}),
    "dpo": (dpo, {"name": "dpo", "kl_coef": 0.3}),
    "ipo": (ipo, {"name": "ipo", "kl_coef": 0.3}),
    "online_dpo": (online_dpo, {"name": "online_dpo", "kl_coef": 0.3}),
    "kto": (kto, {"name": "kto", "kl_coef": 0.3}),
    "sft": (sft, {"name": "sft"}),
    "distillation": (distillation, {"kl_coef": 0, "teacher_coef": 0.7}),
    "distillation over 3 tokens": (distillation_over(3), {"kl_coef": 0, "teacher_coef": 0.7, "teacher_top_k": 3}),
    "distillation over the vocabulary": (
        distillation_over(None),
        {"kl_coef": 0, "teacher_coef": 0.7, "teacher_top_k": "all"},
    ),
    "dual clip": (dual_clip, {"kl_coef": 0, "dual_clip": 1.3}),
    **{
        f"unbiased {name}": (unbiased_kl(name), {"kl_coef": 0.3, "kl_estimator": name, "has_unbiased_kl": True})
        for name in ("k1", "k2", "k3")
    },
    "unbiased k3 of stale samples": (
        unbiased_kl("k3", is_weighed=True),
        {"kl_coef": 0.3, "has_unbiased_kl": True, "importance": "truncate", "importance_high": 1.5},
    ),
    "truncated tokens": (
        weigh_grpo(truncated_tokens),
        {"kl_coef": 0, "importance": "truncate", "importance_high": 1.5},
    ),
    "masked tokens": (weigh_grpo(masked_tokens), {"kl_coef": 0, "importance": "mask"}),
    "truncated sequences": (
        weigh_grpo(truncated_sequence),
        {"kl_coef": 0, "importance": "truncate", "importance_level": "sequence"},
    ),
    "masked sequences": (
        weigh_grpo(masked_sequence),
        {"kl_coef": 0, "importance": "mask", "importance_level": "sequence"},
    ),
    "masked geometric means": (
        weigh_grpo(masked_mean),
        {"kl_coef": 0, "importance": "mask", "importance_level": "geometric"}
        | {"importance_low": 0.8, "importance_high": 1.25},
    ),
    "vetoed answers": (weigh_grpo(veto_answers), {"kl_coef": 0, "importance": "truncate", "importance_veto": 0.4}),
    "masked sequences in cispo": (
        weigh_cispo,
        {"name": "cispo", "importance": "mask", "importance_level": "sequence"},
    ),
    "truncated tokens in gspo": (
        lambda answers: gspo(answers, truncated_tokens),
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15, "importance": "truncate", "importance_high": 1.5},
    ),
    "masked sequences in gspo": (
        lambda answers: gspo(answers, masked_sequence),
        {"name": "gspo", "clip_low": 0.1, "clip_high": 0.15, "importance": "mask", "importance_level": "sequence"},
    ),
}  # fmt: skip
"""A loss and the job's `algorithm:` that states it."""
KINDS = {"dpo": "pair", "ipo": "pair", "kto": "labelled", "sft": "labelled"}


def build_case(name: str) -> dict[str, Any]:
    settings = {"name": "grpo", "importance": "none"} | CASES[name][1]
    kind = KINDS.get(settings["name"], "sampled")
    rows = draw_rows(kind)
    if settings["name"] == "sft":
        rows = [{**row, "reward": 1.0, "group": index} for index, row in enumerate(rows)]
    num_samples = {"labelled": 2, "pair": 2}.get(kind, GROUP_SIZE) if settings["name"] != "sft" else 1
    overrides: dict[str, Any] = {f"algorithm.{key}": value for key, value in settings.items()} | {
        "workload.num_samples_per_prompt": num_samples,
        "workload.num_prompts_per_step": len(rows) // num_samples,
        "workload.max_prompt_len": 4,
        "workload.max_response_len": MAX_RESPONSE,
        "training.zero_stage": 0,
        "training.max_tokens_per_micro_batch": 40,
    }
    if settings["name"] == "ppo":
        overrides["roles.value.shares_backbone"] = True
    if "teacher_coef" in settings:
        overrides["roles.teacher.path"] = make_teacher()[1]
    return {"exercise": "losses", "overrides": overrides, "rollouts": rows}


@cache
def recompute(name: str) -> tuple[float, dict[str, list[float]]]:
    """The loss over the whole mini-batch, and the gradient of each parameter."""
    model = load_model()
    model.zero_grad()
    answers, head = read_answers(build_case(name)["rollouts"])
    loss = CASES[name][0](answers)
    loss.backward()
    gradients = {f"language_model.{name}": p.grad.double().flatten() for name, p in model.named_parameters()}
    if head.grad is not None:
        gradients["value_head.weight"] = head.grad.double()
    return float(loss.detach()), {name: values[::EVERY].tolist() for name, values in gradients.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[Any]]:
    """Answers of one rank with passes of 40 tokens, and of two ranks, for each case."""
    results: dict[tuple[int, str], list[Any]] = {}
    for num_ranks in (1, 2):
        cases = {name: build_case(name) for name in CASES}
        for name, answers in exercise(num_ranks, cases, tmp_path_factory.mktemp("ranks")).items():
            results[num_ranks, name] = answers
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_s_loss_and_gradient_are_those_of_the_paper_s_formula(
    trained: dict[tuple[int, str], list[Any]], name: str, num_ranks: int
) -> None:
    loss, gradients = recompute(name)
    ranks = trained[num_ranks, name]
    assert num_ranks * ranks[0]["passes"] > 1
    total = sum(rank["sums"]["loss"] + 0.5 * rank["sums"].get("value_loss", 0.0) for rank in ranks)
    assert total == pytest.approx(loss, abs=BOUND)
    largest = max(abs(value) for values in gradients.values() for value in values)
    assert largest > 1e-3, "a gradient of 0 would prove nothing"
    for parameter, values in gradients.items():
        assert ranks[0]["gradients"][parameter] == pytest.approx(values, abs=BOUND * max(1.0, largest)), parameter


def test_the_corrections_are_those_of_the_case_and_not_all_or_none(
    trained: dict[tuple[int, str], list[Any]],
) -> None:
    """Each correction changes some answers and leaves others, so that the comparison above sees both."""
    for name, (_, settings) in CASES.items():
        if settings.get("importance", "none") != "none":
            sums = trained[1, name][0]["sums"]
            assert sums["is_corrected_sum"] + sums["is_masked_sum"] > 0, name
            assert sums["is_masked_sum"] < sums["is_masked_count"], name
    assert trained[1, "dual clip"][0]["sums"]["is_clipped_sum"] > trained[1, "grpo"][0]["sums"]["is_clipped_sum"]
