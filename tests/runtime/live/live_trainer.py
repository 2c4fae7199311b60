"""A live policy trainer on a CPU rank, as a process that live_ranks.py starts.

Each input line names a folder with a JSON list of cases, each with overrides of the factories' job and the name of an
exercise below, and writes there what each exercise gave.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Case = Mapping[str, Any]


def main(rank: int, num_ranks: int, port: int, pipe: str) -> None:
    """One rank, until it is ended. pipe: a named one, from which it reads folders."""
    import deepspeed

    from tests.runtime.live.live_forks import answer

    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch computes in it; DeepSpeed thinks of speed
    asked = Path(pipe).open()  # noqa: SIM115, for as long as this process lives
    for line in asked:
        folder = Path(line.strip())
        answers = {}
        for name, case in json.loads((folder / "cases.json").read_text()).items():
            live = LiveRank(rank, num_ranks, port, case)
            answers[name] = EXERCISES[case["exercise"]](live)
            live.call("stop")
        answer(folder / f"answer-{rank}.json", answers)


class LiveRank:
    """A started rank, which remembers what it held before it was started."""

    def __init__(self, rank: int, num_ranks: int, port: int, case: Case) -> None:
        import torch.distributed as dist

        from rlplan.emit.execution import execution_spec
        from rlplan.runtime.measure.memory_meter import resident_bytes
        from rlplan.runtime.workers.trainer.policy_trainer import PolicyTrainer

        plan = plan_case(num_ranks, case)
        self.plan, self.job, self.rank, self.num_ranks, self.case = plan, plan.job, rank, num_ranks, case
        self.is_half = plan.job.training.dtype == "float16"
        ranks_per_pass = plan.job.training.num_ranks_per_pass
        self.num_shares, self.share = num_ranks // ranks_per_pass, rank // ranks_per_pass
        self.trainer = PolicyTrainer(f"policy_trainer/{rank}", plan.job, execution_spec(plan).deepspeed["policy"], 1)
        self.trainer.import_libraries()
        if rank == 0 and not dist.is_initialized():
            self.trainer.open_rendezvous("127.0.0.1", port)
        self.baseline = resident_bytes()
        self.start = self.measured("start", rank, num_ranks, ("127.0.0.1", port), plan.job.policy.path)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method's result."""
        return getattr(self.trainer, method)(*arguments)

    def measured(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Memory of a method's call above the baseline: its peak, its end, and components by kind."""
        _, measurement = self.trainer.call_measured(method, *arguments)
        kinds = {kind: size for (_, kind), size in measurement.components.items()}
        return {
            "peak": measurement.peak_bytes - self.baseline,
            "resident": measurement.resident_bytes - self.baseline,
            "components": kinds,
            "seconds": measurement.end_s - measurement.start_s,
        }


def plan_case(num_ranks: int, case: Case) -> Any:
    """The plan of a case."""
    from tests.factories import make_plan

    return make_plan(**{"hardware.num_devices": num_ranks, "algorithm.kl_coef": 0.0} | case.get("overrides", {}))


def make_samples(live: LiveRank, count: int = 16) -> tuple[list[list[Any]], list[list[float]]]:
    """This rank's micro-batches of a made-up mini-batch and what their tokens count. The last one is a dummy."""
    from rlplan.runtime.learning.packing import pack_shares
    from rlplan.runtime.rollout.experience import TrainSample

    samples = [
        TrainSample(
            (5, 6, 7),
            tuple(3 + i * j % 12 for j in range(2 + i % 5)),
            (-1.0,) * (2 + i % 5),
            (),
            ((-1.0) ** i,) * (2 + i % 5),
            (),
            (0.0,) * (2 + i % 5),
            (1.0,) * (2 + i % 5),
        )
        for i in range(count)
    ]
    limit = live.case.get("limit", 30)
    shares = pack_shares([3 + len(s.response_tokens) for s in samples], live.num_shares, limit)
    return pack_samples(samples, shares[live.share])


def pack_samples(samples: list[Any], packs: list[list[int]]) -> tuple[list[list[Any]], list[list[float]]]:
    """Micro-batches and what their tokens count; a dummy after them."""
    packs = [*packs, []]
    weights = [[1 / (len(samples) * len(samples[index].response_tokens)) for index in pack] for pack in packs]
    return [[samples[index] for index in pack] for pack in packs], weights


def make_longest_samples(live: LiveRank) -> tuple[list[list[Any]], list[list[float]]]:
    """This rank's share of a mini-batch of sequences as long as the job allows."""
    from rlplan.runtime.learning.packing import pack_shares
    from rlplan.runtime.rollout.experience import TrainSample

    work = live.job.workload
    prompt, response = tuple(range(3, 3 + work.max_prompt_len)), tuple(range(5, 5 + work.max_response_len))
    size = len(response)
    samples = [TrainSample(prompt, response, (-1.0,) * size, (), (1.0,) * size) for _ in range(work.mini_batch_size)]
    lengths = [work.max_seq_len] * work.mini_batch_size
    packs = pack_shares(lengths, live.num_shares, live.job.max_tokens_per_micro_batch)[live.share]
    weight = 1 / (work.mini_batch_size * size)
    return [[samples[index] for index in pack] for pack in packs], [[weight] * len(pack) for pack in packs]


def train(live: LiveRank) -> dict[str, float]:
    """One optimizer step."""
    sums = live.call("forward_backward", *make_samples(live))
    return {"loss": sums["loss"], **live.call("optimizer_step")}


def cut(live: LiveRank) -> dict[str, Any]:
    """One step of a mini-batch that is cut into passes of at most the case's `limit` tokens."""
    micro_batches, weights = make_samples(live)
    sums = live.call("forward_backward", micro_batches, weights)
    norm = live.call("optimizer_step")["grad_norm"]
    kept = [float(tensor.double().sum()) for _, tensor in live.call("weights")]
    passes = len(micro_batches) - 1  # the last one is a dummy, which gives no gradient
    return {"passes": passes, "norm": norm, "loss": sums["loss"], "tokens": sums["num_tokens"], "weights": kept}


def source(live: LiveRank) -> dict[str, Any]:
    """Two steps, then the whole weights through the source: names, shapes, types and a sum of each."""
    log = [train(live) for _ in range(2)]
    weights = live.call("weights")
    seen = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in weights}
    sums = {name: float(tensor.double().sum()) for name, tensor in weights}
    weights.join_gathers()
    log.append(train(live))
    return {"seen": seen, "sums": sums, "log": log}


def first_step(live: LiveRank) -> dict[str, Any]:
    """How far the first step moves the weights that it moves, on average."""
    import torch

    before = {name: tensor.double().clone() for name, tensor in live.call("weights")}
    train(live)
    moves = torch.cat([(tensor.double() - before[name]).abs().flatten() for name, tensor in live.call("weights")])
    return {"mean_move": float(moves[moves != 0].mean())}


def memory(live: LiveRank) -> dict[str, Any]:
    """Two steps of longest sequences: what each call held."""
    samples = make_longest_samples(live)
    answer = {"start": live.start}
    for name in ("first", "steady"):
        answer[f"{name}/forward_backward"] = live.measured("forward_backward", *samples)
        answer[f"{name}/step"] = live.measured("optimizer_step")
    return answer


def swap(live: LiveRank) -> dict[str, Any]:
    """Three steps; before the last one everything is offloaded to disk and comes back."""
    log = [train(live) for _ in range(2)]
    before = live.measured("components")
    offloaded = live.measured("offload", "disk")
    back = live.measured("reload")
    log.append(train(live))
    sums = {name: float(tensor.double().sum()) for name, tensor in live.call("weights")}
    return {"log": log, "sums": sums, "before": before, "offloaded": offloaded, "back": back}


def agree(live: LiveRank) -> dict[str, Any]:
    """Log-probs of 16 sequences, the gradient of each tensor (in stage 0), and what two steps make of them."""
    import torch
    import torch.distributed as dist

    from rlplan.runtime.rollout.experience import SequencePair

    micro_batches, weights = make_samples(live)
    pairs = [SequencePair(s.prompt_tokens, s.response_tokens) for batch in micro_batches for s in batch]

    def logprobs() -> list[float]:
        with torch.no_grad():
            judged = live.trainer._score_pairs(pairs, lambda batch: live.trainer.engine.module(batch)[0])
        return [value for each in judged for value in each]

    before = logprobs()
    losses = [live.call("forward_backward", micro_batches, weights)]
    gradients = {}
    for name, parameter in live.trainer.engine.module.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.double()
            dist.all_reduce(whole)
            whole /= live.trainer.engine.dp_world_size
            gradients[name] = [float(number) for number in whole.flatten()[:: max(1, whole.numel() // 8)]]
    steps = [live.call("optimizer_step")]
    losses.append(live.call("forward_backward", micro_batches, weights))
    steps.append(live.call("optimizer_step"))
    norms = [step["grad_norm"] for step in steps]
    sums = {name: float(tensor.double().abs().sum()) for name, tensor in live.call("weights")}
    return {
        "logprobs": [before, logprobs()],
        "losses": losses,
        "gradients": gradients,
        "norms": norms,
        "sums": sums,
        "components": live.measured("components")["components"],
        "buffers": sorted({str(buffer.dtype) for buffer in live.trainer.engine.module.buffers()}),
    }


def elsewhere(module: str, name: str) -> Callable[[LiveRank], Any]:
    """An exercise of another module, which is imported when it is done."""
    return lambda live: getattr(importlib.import_module(module), name)(live)


def train_with_loss_scale(live: LiveRank) -> dict[str, Any]:
    """Eight steps, the first two with a huge loss: loss, norm, whether each was left out, the loss scale after it."""
    answer: dict[str, Any] = {"losses": [], "steps": [], "scales": []}
    micro_batches, weights = make_samples(live)
    huge = [[weight * 1e4 for weight in each] for each in weights]
    for step in range(8):
        sums = live.call("forward_backward", micro_batches, huge if step < 2 and live.is_half else weights)
        answer["losses"].append(sums["loss"])
        answer["steps"].append(live.call("optimizer_step"))
        optimizer = live.trainer.engine.optimizer
        answer["scales"].append(float(getattr(optimizer, "loss_scale", 1.0)))
    answer["components"] = live.measured("components")["components"]
    return answer


EXERCISES: dict[str, Callable[[LiveRank], Any]] = {
    "cut": cut,
    "source": source,
    "first_step": first_step,
    "memory": memory,
    "swap": swap,
    "agree": agree,
    **{name: elsewhere("tests.runtime.live.live_checkpoints", name) for name in ("resume", "take_over")},
    "scaled": train_with_loss_scale,
    "losses": elsewhere("tests.runtime.live.live_losses", "losses"),
    **{
        name: elsewhere("tests.runtime.live.live_roles", name)
        for name in ("adapted", "adapters", "role_adapters", "value_head")
    },
}
