"""Live policy trainers on CPU ranks: one start of the processes for many cases.

Run as a program it is one rank: it gets a JSON list of cases, each with overrides of the factories' job and the name of
an exercise below, and prints what each exercise gave. `exercise` starts the ranks, once for all cases.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 280

Case = Mapping[str, Any]


def exercise(num_ranks: int, cases: Mapping[str, Case], folder: Path) -> dict[str, list[Any]]:
    """For each case what each rank gave. A case: `exercise` by name and `overrides` of the job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "cases.json").write_text(json.dumps(dict(cases)))
    ranks = []
    for rank in range(num_ranks):
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            DS_ACCELERATOR="cpu",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS="1",
            TORCH_COMPILE_DISABLE="1",
            MALLOC_MMAP_THRESHOLD_=str(128 * 1024),
            MALLOC_TRIM_THRESHOLD_=str(256 * 1024),
            MALLOC_ARENA_MAX="1",
        )
        command = [sys.executable, __file__, str(rank), str(num_ranks), str(port), str(folder)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    answers = []
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors.decode()[-4000:]
        answers = [json.loads((folder / f"answer-{rank}.json").read_text()) for rank in range(num_ranks)]
    finally:
        for process in ranks:
            process.kill()
    return {name: [answer[name] for answer in answers] for name in cases}


def main(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    """One rank, all cases."""
    import deepspeed

    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch computes in it; DeepSpeed thinks of speed
    answers = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        live = LiveRank(rank, num_ranks, port, case)
        answers[name] = EXERCISES[case["exercise"]](live)
        live.call("stop")
    (folder / f"answer-{rank}.json").write_text(json.dumps(answers))


class LiveRank:
    """A started rank, which remembers what it held before it was started."""

    def __init__(self, rank: int, num_ranks: int, port: int, case: Case) -> None:
        import torch.distributed as dist

        from rlplan.emit.execution import execution_spec
        from rlplan.runtime.workers.memory_meter import resident_bytes
        from rlplan.runtime.workers.policy_trainer import PolicyTrainer

        plan = plan_of(num_ranks, case)
        self.job, self.rank, self.num_ranks = plan.job, rank, num_ranks
        self.is_half = plan.job.training.dtype == "float16"
        ways = plan.job.training.num_ranks_per_pass
        self.num_shares, self.share = num_ranks // ways, rank // ways
        self.trainer = PolicyTrainer(f"policy_trainer/{rank}", plan.job, execution_spec(plan).deepspeed["policy"], 1)
        self.trainer.import_libraries()
        if rank == 0 and not dist.is_initialized():
            self.trainer.open_rendezvous("127.0.0.1", port)
        self.baseline = resident_bytes()
        self.start = self.measured("start", rank, num_ranks, port, plan.job.policy.path)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method's result."""
        return getattr(self.trainer, method)(*arguments)

    def measured(self, method: str, *arguments: Any) -> dict[str, Any]:
        """What a method's call held beyond the baseline: its peak, its end, and components by kind."""
        _, found = self.trainer.perform(method, *arguments)
        kinds = {kind: size for (_, kind), size in found.components.items()}
        return {
            "peak": found.peak_bytes - self.baseline,
            "resident": found.resident_bytes - self.baseline,
            "components": kinds,
            "seconds": found.end_s - found.start_s,
        }


def plan_of(num_ranks: int, case: Case) -> Any:
    """The plan of a case."""
    from tests.factories import make_plan

    return make_plan(**{"hardware.num_devices": num_ranks, "algorithm.kl_coef": 0.0} | case.get("overrides", {}))


def samples_of(live: LiveRank, count: int = 16) -> tuple[list[list[Any]], list[list[float]]]:
    """This rank's micro-batches of a made-up mini-batch and what their tokens count. The last one is a dummy."""
    from rlplan.runtime.experience import TrainSample
    from rlplan.runtime.packing import pack_shares

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
    return packed(samples, pack_shares([3 + len(s.response_tokens) for s in samples], live.num_shares, 30)[live.share])


def packed(samples: list[Any], packs: list[list[int]]) -> tuple[list[list[Any]], list[list[float]]]:
    """Micro-batches and what their tokens count; a dummy after them."""
    packs = [*packs, []]
    weights = [[1 / (len(samples) * len(samples[index].response_tokens)) for index in pack] for pack in packs]
    return [[samples[index] for index in pack] for pack in packs], weights


def longest_samples_of(live: LiveRank) -> tuple[list[list[Any]], list[list[float]]]:
    """This rank's share of a mini-batch of sequences as long as the job allows."""
    from rlplan.runtime.experience import TrainSample
    from rlplan.runtime.packing import pack_shares

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
    sums = live.call("forward_backward", *samples_of(live))
    return {"loss": sums["loss"], **live.call("optimizer_step")}


def source(live: LiveRank) -> dict[str, Any]:
    """Two steps, then the whole weights through the source: names, shapes, types and a sum of each."""
    log = [train(live) for _ in range(2)]
    weights = live.call("weights")
    meta = {entry.name: [str(entry.dtype), *entry.shape] for entry in weights.metadata()}
    seen = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in weights}
    sums = {name: float(tensor.double().sum()) for name, tensor in weights}
    weights.take_part()
    log.append(train(live))
    return {"meta": meta, "seen": seen, "sums": sums, "log": log}


def memory(live: LiveRank) -> dict[str, Any]:
    """Two steps of longest sequences: what each call held."""
    samples = longest_samples_of(live)
    answer = {"start": live.start}
    for name in ("first", "steady"):
        answer[f"{name}/forward_backward"] = live.measured("forward_backward", *samples)
        answer[f"{name}/step"] = live.measured("optimizer_step")
    return answer


def swap(live: LiveRank) -> dict[str, Any]:
    """Three steps; before the last one everything is parked on disk and comes back."""
    log = [train(live) for _ in range(2)]
    before = live.measured("components")
    parked = live.measured("offload", "disk")
    back = live.measured("reload")
    log.append(train(live))
    sums = {name: float(tensor.double().sum()) for name, tensor in live.call("weights")}
    return {"log": log, "sums": sums, "before": before, "parked": parked, "back": back}


def agree(live: LiveRank) -> dict[str, Any]:
    """Log-probs of 16 sequences, the gradient of each tensor (in stage 0), and what two steps make of them."""
    import torch
    import torch.distributed as dist

    from rlplan.runtime.experience import SequencePair

    micro_batches, weights = samples_of(live)
    pairs = [SequencePair(s.prompt_tokens, s.response_tokens) for batch in micro_batches for s in batch]

    def logprobs() -> list[float]:
        with torch.no_grad():
            judged = live.trainer._judge(pairs, lambda batch: live.trainer.engine.module(batch)[0])
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
    }


def elsewhere(module: str, name: str) -> Callable[[LiveRank], Any]:
    """An exercise of another module, which is imported when it is done."""
    return lambda live: getattr(importlib.import_module(module), name)(live)


def adapted(live: LiveRank) -> dict[str, Any]:
    """Steps of adapters: what the base said and says, what the policy says, and what was saved says elsewhere."""
    import tempfile

    import torch

    from rlplan.runtime.experience import SequencePair
    from rlplan.runtime.workers.scorer import Scorer

    micro_batches, weights = samples_of(live)
    pairs = [SequencePair(s.prompt_tokens, s.response_tokens) for batch in micro_batches for s in batch]

    def said() -> list[float]:
        with torch.no_grad():
            return flat(live.trainer._judge(pairs, lambda batch: live.trainer.engine.module(batch)[0]))

    def flat(scores: list[tuple[float, ...]]) -> list[float]:
        return [value for each in scores for value in each]

    answer: dict[str, Any] = {"start": said()}
    for _ in range(2):
        live.call("forward_backward", micro_batches, weights)
        live.call("optimizer_step")
    answer |= {"trained": said(), "reference": flat(live.call("score", pairs, "reference"))}
    answer["components"] = live.measured("components")["components"]
    with tempfile.TemporaryDirectory() as folder:
        live.call("save", folder, live.job.policy.path)
        scorer = Scorer("scorer/reference/0", live.job, "reference", 1)
        scorer.start(folder)
        answer["saved"] = flat(scorer.score(pairs, "reference"))
    return answer


def scaled(live: LiveRank) -> dict[str, Any]:
    """Eight steps, the first two with a huge loss: loss, norm, whether each was left out, the loss scale after it."""
    answer: dict[str, Any] = {"losses": [], "steps": [], "scales": []}
    micro_batches, weights = samples_of(live)
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
    "source": source,
    "memory": memory,
    "swap": swap,
    "agree": agree,
    **{name: elsewhere("tests.runtime.live_checkpoints", name) for name in ("resume", "take_over")},
    "adapted": adapted,
    "scaled": scaled,
}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
