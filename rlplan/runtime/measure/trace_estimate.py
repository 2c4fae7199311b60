"""Estimate from a trace: the training peak of one GPU, for architectures without formulas.

Activations, logits and temporaries are traced. The states follow DeepSpeed's formulas for the traced number of
parameters.
In: a `config.json` as data, a JobSpec. Out: bytes by kind. Left out: rollouts, scoring, weight sync.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlplan.dataflow.choice import TrainerChoice
from rlplan.errors import SpecError
from rlplan.memory.roles.process import add, process_overheads
from rlplan.memory.roles.states import build_zero_settings
from rlplan.memory.trainers.zero import ZeroStates
from rlplan.planner.setting import read_gpus
from rlplan.runtime.measure.tracing import LOSSES, trace_peak
from rlplan.spec.job import JobSpec
from rlplan.spec.model import Parameter
from rlplan.spec.models.config import read_config
from rlplan.spec.resolved import settle
from rlplan.vocabulary import Dtype, MemoryKind

TRACE_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TraceEstimate:
    """The training peak of one GPU, with traced activations."""

    model: str
    gpu: str
    num_gpus: int
    capacity: int
    num_parameters: int
    """Parameters of the whole model."""

    num_tokens: int
    """Tokens of the traced micro-batch."""

    zero_stage: int
    gradient_checkpointing: bool
    loss: str
    """Implementation of the loss: a key of `tracing.LOSSES`."""

    rows: dict[MemoryKind, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.rows.values())

    def as_json(self) -> dict[str, Any]:
        rows = {kind.value: size for kind, size in self.rows.items()}
        fits = self.num_bytes <= self.capacity
        return {"schema_version": TRACE_SCHEMA_VERSION, **vars(self), "rows": rows, "fits": fits} | {
            "num_bytes": self.num_bytes
        }


def trace_estimate(asked: JobSpec) -> TraceEstimate:
    """Trace one micro-batch of the job's longest sequences. Raises: SpecError if it cannot be traced."""
    job = settle(asked)
    training, workload = job.training, job.workload
    loss = training.logits
    if loss not in LOSSES:
        raise SpecError(
            f"training.logits '{loss}' cannot be traced",
            where="training.logits",
            rule=f"one of {', '.join(LOSSES)}",
            way_out="training.logits=chunked is the closest",
        )
    num_gpus, gpu, capacity = read_gpus(job)
    rollouts = 1 if workload.micro_batch_size_per_gpu == "auto" else int(workload.micro_batch_size_per_gpu)
    sequences = max(rollouts, job.sequences_per_unit)
    recomputes = training.gradient_checkpointing is True
    peak = trace_peak(
        _whole_config(job.policy.path),
        sequences * workload.max_seq_len,
        recompute="full" if recomputes else "none",
        loss=loss,
        dtype=torch.float32 if training.dtype is Dtype.FLOAT32 else torch.bfloat16,
        batch=sequences,
    )
    num_parameters = peak.parameters // training.dtype.num_bytes
    stage = 3 if training.zero_stage == "auto" else int(training.zero_stage)
    choice = TrainerChoice(stage, recomputes, training.offloads_optimizer is True, False, rollouts)
    states = ZeroStates(build_zero_settings(training, choice, num_gpus), (Parameter("all", (num_parameters,)),))
    rows = add(dict(states.after_backward().device), process_overheads(gpu.overheads, num_gpus))
    passing = {MemoryKind.ACTIVATIONS: peak.rest, MemoryKind.COMM_BUFFERS: states.gathered_bytes(0)}
    return TraceEstimate(
        model=job.policy.path,
        gpu=gpu.name,
        num_gpus=num_gpus,
        capacity=capacity,
        num_parameters=num_parameters,
        num_tokens=sequences * workload.max_seq_len,
        zero_stage=stage,
        gradient_checkpointing=recomputes,
        loss=loss,
        rows=add(rows, passing),
    )


def _whole_config(name: str) -> dict[str, Any]:
    """Read the config at a path; the catalogue's copy lacks the keys that no formula uses. Raises: SpecError."""
    path = Path(name).expanduser()
    return read_config(path / "config.json" if path.is_dir() else path)
