"""Any algorithm's loss on a live trainer rank: a step's rollouts become a gradient as in a run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplan.runtime.rollout.experience import Rollout
    from tests.runtime.live.live_trainer import LiveRank

EVERY = 61
"""One of so many elements of a gradient is compared."""
NUM_DUMMIES = 64
"""Weights of the value head before training: `place / 64 - 1` of them, so that its values are not 0."""


def read_rollouts(rows: list[dict[str, Any]]) -> list["Rollout"]:
    """The rollouts of a case, each a row of numbers (test_losses_recomputed.py)."""
    from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout

    rollouts = []
    for row in rows:
        observed = tuple((start, end) for start, end in row["observed"])
        completion = Completion(tuple(row["response"]), tuple(row["sampled"]), "stop", observed=observed)
        rollouts.append(
            Rollout(
                Prompt("1", "", "", tuple(row["prompt"])),
                row["group"],
                completion,
                num_ignored=row["num_ignored"],
                has_failed=row["has_failed"],
                baseline=row["greedy_reward"],
                reward=row["reward"],
                scores={role: tuple(values) for role, values in row["scores"].items()},
            )
        )
    return rollouts


def ask_teacher(live: "LiveRank", rollouts: list["Rollout"]) -> None:
    """Let a scorer with the teacher's folder give its distributions."""
    from rlplan.runtime.rollout.experience import SequencePair, TeacherTokens
    from rlplan.runtime.workers.scorer import Scorer

    scorer = Scorer("scorer/teacher/0", live.job, "teacher", 1)
    scorer.start(str(live.job.roles.teacher.path))
    pairs = [SequencePair(r.prompt.tokens, r.completion.tokens, r.completion.observed) for r in rollouts]
    for rollout, tokens in zip(rollouts, scorer.score(pairs, "teacher"), strict=True):
        assert isinstance(tokens, TeacherTokens)
        rollout.teacher_tokens = tokens


def losses(live: "LiveRank") -> dict[str, Any]:
    """This rank's passes, its loss, and the whole mini-batch's gradient by parameter."""
    import torch
    import torch.distributed as dist

    from rlplan.runtime.learning.mini_batch import assign_baselines, assign_samples, make_train_sample
    from rlplan.runtime.losses.registry import find_advantage

    job, module = live.job, live.trainer.engine.module
    if hasattr(module, "value_head"):
        weight = module.value_head.weight
        with torch.no_grad():
            weight.copy_(torch.arange(weight.numel()).view_as(weight) / NUM_DUMMIES - 1)
    rollouts = read_rollouts(live.case["rollouts"])
    if job.algorithm.teacher_top_k:
        ask_teacher(live, rollouts)
    for rollout, judged in zip(rollouts, find_advantage(job.algorithm)(rollouts, job.algorithm), strict=True):
        rollout.advantage, rollout.advantages, rollout.returns = judged.whole, judged.advantages, judged.returns
    samples = [make_train_sample(rollout) for rollout in rollouts]
    passes = assign_samples(samples, job, live.num_shares)[live.share]
    baseline = assign_baselines(samples, job, live.num_shares)[live.share]
    sums = live.call("forward_backward", [each for each, _ in passes], [weights for _, weights in passes], baseline)
    gradients = {}
    for name, parameter in module.named_parameters():
        whole = parameter.grad.double()
        dist.all_reduce(whole)
        gradients[name] = (whole / live.trainer.engine.dp_world_size).flatten()[::EVERY].tolist()
    live.call("optimizer_step")
    return {"passes": len(passes), "sums": sums, "gradients": gradients}
