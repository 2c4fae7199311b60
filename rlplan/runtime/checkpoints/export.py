"""Export: the policy in a checkpoint as a Hugging Face folder, adapters merged into it and beside it in PEFT's layout.

In: a run folder with a checkpoint and the run's plan. Out: a folder that vLLM and transformers load.
Left out: the value model, and Adam's states. `python -m rlplan.runtime.checkpoints.export RUN_DIR OUT`.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlplan.memory.gpu.states import autotp_parameters
from rlplan.planner.plan import read_plan
from rlplan.runtime.adapters import MergedWeights, add_adapters, save_adapter
from rlplan.runtime.checkpoints.finding import find_checkpoint
from rlplan.runtime.checkpoints.fragments import MASTER, part_name
from rlplan.runtime.checkpoints.stored_states import StoredStates
from rlplan.runtime.checkpoints.tensor_file import TensorFile
from rlplan.runtime.start_checkpoint import load_language_model, save_policy
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import Role

PREFIX = "language_model."
"""What stands before the policy's names in the module that is trained; a value head has another one."""


def export_policy(run_folder: Path, out: Path) -> int:
    """Write the policy of a run's last checkpoint; gives its step. Raises: SpecError."""
    found, job = find_checkpoint(run_folder), read_plan(run_folder / "plan.json").job
    tp = job.training.tp
    start = run_folder / "start_policy"
    model = load_language_model(str(start if start.is_dir() else job.policy.path), torch.float32)
    if job.training.trains_adapters:
        add_adapters(model, job)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(Path(path))) for path in found.paths(Role.POLICY)]
        held = {parameter.name: parameter.shape for parameter in autotp_parameters(job.load_model(), tp)}
        _fill(model, [StoredStates(files, part_name(rank, tp)) for rank in range(tp)], held)
    model.to(getattr(torch, job.training.dtype.value))
    source = MergedWeights(model) if job.training.trains_adapters else WeightSource(model)
    save_policy(model.config, source, out, Path(job.policy.path))
    _save_adapters(model, job, out)
    return found.step


@torch.no_grad()
def _fill(model: Any, stored: Sequence[StoredStates], held: Mapping[str, tuple[int, ...]]) -> None:
    """stored: of ranks that share every layer one each, else one alone. held: the shapes of what such a rank has."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = {name: held.get(name, tuple(parameter.shape)) for name, parameter in trained.items()}
    for rank, states in enumerate(stored):
        part = part_name(rank, len(stored))
        states.check({PREFIX + name + part: list(shape) for name, shape in shapes.items()}, others_too=True)
        for name, parameter in trained.items():
            whole, own = parameter.data, torch.empty(shapes[name])
            states.fill(own, MASTER, PREFIX + name + part)
            for axis, size in enumerate(own.shape):
                whole = whole.narrow(axis, rank * size if size < whole.shape[axis] else 0, size)
            whole.copy_(own)


def _save_adapters(model: Any, job: JobSpec, out: Path) -> None:
    if job.training.trains_adapters:
        save_adapter(model, job, out / "adapter")


if __name__ == "__main__":
    print(f"the policy after step {export_policy(Path(sys.argv[1]), Path(sys.argv[2]))}: {sys.argv[2]}")
