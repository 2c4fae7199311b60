"""Live policy trainers on CPU ranks: one start of the processes for many cases.

Run as a program it is one rank: it gets a JSON list of cases, each with overrides of the factories' job and the name of
an exercise below, and prints what each exercise gave. `exercise` starts the ranks, once for all cases.
"""

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
            PYTHONPATH=str(ROOT),
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
    answers = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        trainer = make_trainer(rank, num_ranks, port, case)
        answers[name] = EXERCISES[case["exercise"]](trainer, rank, num_ranks)
        trainer.stop()
    (folder / f"answer-{rank}.json").write_text(json.dumps(answers))


def make_trainer(rank: int, num_ranks: int, port: int, case: Case) -> Any:
    """A started rank."""
    import torch.distributed as dist

    from rlplan.emit.execution import execution_spec
    from rlplan.runtime.workers.policy_trainer import PolicyTrainer
    from tests.factories import make_plan

    plan = make_plan(**{"hardware.num_devices": num_ranks, "algorithm.kl_coef": 0.0} | case.get("overrides", {}))
    trainer = PolicyTrainer(f"policy_trainer/{rank}", plan.job, execution_spec(plan).deepspeed["policy"], 1)
    trainer.import_libraries()
    if rank == 0 and not dist.is_initialized():
        trainer.open_rendezvous(port)
    trainer.start(rank, num_ranks, port, plan.job.policy.path)
    return trainer


def samples_of(rank: int, num_ranks: int, count: int = 16) -> tuple[list[list[Any]], list[list[float]]]:
    """This rank's micro-batches of a made-up mini-batch and what their tokens count. The last one is a dummy."""
    from rlplan.runtime.experience import TrainSample
    from rlplan.runtime.packing import pack_shares

    samples = [
        TrainSample(
            (5, 6, 7),
            tuple(3 + (i * j) % 12 for j in range(2 + i % 5)),
            (-1.0,) * (2 + i % 5),
            (),
            ((-1.0) ** i,) * (2 + i % 5),
        )
        for i in range(count)
    ]
    packs = [*pack_shares([3 + len(sample.response_tokens) for sample in samples], num_ranks, 30)[rank], []]
    weights = [[1 / (count * len(samples[index].response_tokens)) for index in pack] for pack in packs]
    return [[samples[index] for index in pack] for pack in packs], weights


def train(trainer: Any, rank: int, num_ranks: int) -> dict[str, float]:
    """One optimizer step."""
    sums = trainer.forward_backward(*samples_of(rank, num_ranks))
    return {"loss": sums["loss"], **trainer.optimizer_step()}


def source(trainer: Any, rank: int, num_ranks: int) -> dict[str, Any]:
    """Two steps, then the whole weights through the source: names, shapes, types and a sum of each."""
    log = [train(trainer, rank, num_ranks) for _ in range(2)]
    weights = trainer.weights()
    meta = {entry.name: [str(entry.dtype), *entry.shape] for entry in weights.metadata()}
    seen = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in weights}
    sums = {name: float(tensor.double().sum()) for name, tensor in weights}
    weights.take_part()
    log.append(train(trainer, rank, num_ranks))
    return {"meta": meta, "seen": seen, "sums": sums, "log": log}


EXERCISES: dict[str, Callable[[Any, int, int], Any]] = {"source": source}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
