"""KTO on a live trainer rank: the gradient of one mini-batch, as the driver deals it out.

Lengths, labels and the reference's log-probs are made up, so that the margins of answers to other prompts differ from
pass to pass and from rank to rank in sign.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.runtime.live.live_trainer import LiveRank

NUM_ANSWERS = 8
EVERY = 37
"""One of so many elements of a gradient is compared."""


def answers() -> list[dict[str, Any]]:
    """Labelled answers (`label` 1 or -1), each followed by one to another prompt (0)."""
    rows = []
    for index in range(NUM_ANSWERS):
        for label in ((1.0, -1.0)[index % 2], 0.0):
            length = 2 + (3 * index + int(label)) % 7
            rows.append(
                {
                    "group": index,
                    "label": label,
                    "prompt": [5, 6, 7][: 1 + index % 3],
                    "response": [3 + (index + 2) * (place + 1) % 9 for place in range(length)],
                    "reference": [-11.0 if index < 5 else -6.0] * length,
                }
            )
    return rows


def kto(live: "LiveRank") -> dict[str, Any]:
    """Passes of this rank, the whole mini-batch's loss and gradient."""
    import torch.distributed as dist

    from rlplan.runtime.learning.mini_batch import assign_baselines, assign_samples
    from rlplan.runtime.rollout.experience import TrainSample

    samples = [
        TrainSample(
            tuple(row["prompt"]),
            tuple(row["response"]),
            (0.0,) * len(row["response"]),
            tuple(row["reference"]),
            (row["label"],) * len(row["response"]),
            group=row["group"],
            advantage=row["label"],
        )
        for row in answers()
    ]
    passes = assign_samples(samples, live.job, live.num_shares)[live.share]
    baseline = assign_baselines(samples, live.job, live.num_shares)[live.share]
    sums = live.call("forward_backward", [each for each, _ in passes], [weights for _, weights in passes], baseline)
    gradients = {}
    for name, parameter in live.trainer.engine.module.language_model.named_parameters():
        whole = parameter.grad.double()
        dist.all_reduce(whole)
        gradients[name] = (whole / live.trainer.engine.dp_world_size).flatten()[::EVERY].tolist()
    live.call("optimizer_step")
    return {"passes": len(passes), "loss": sums["loss"], "baseline": live.trainer.baseline, "gradients": gradients}
