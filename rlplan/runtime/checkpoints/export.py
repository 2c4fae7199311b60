"""Export of a checkpoint's policy to a Hugging Face folder. Adapters are merged, and also saved in PEFT's layout.

In: a run folder with a checkpoint and the run's plan. Out: a folder that vLLM and transformers load.
Left out: the value model and the optimizer states.
Run it with `python -m rlplan.runtime.checkpoints.export RUN_DIR OUT`; the exit codes are those of `rlplan.errors`.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from rlplan.errors import EXIT_BUG, InterruptedRunError, RlplanError, SpecError
from rlplan.memory.trainers.training import cut_autotp_parameters
from rlplan.planner.plan import read_plan
from rlplan.runtime.checkpoints.finding import Resumption, find_best, find_checkpoint
from rlplan.runtime.checkpoints.fragments import MASTER, part_name
from rlplan.runtime.checkpoints.stored_states import StoredStates
from rlplan.runtime.checkpoints.tensor_file import TensorFile
from rlplan.runtime.models.adapters import MergedWeights, add_trained_adapter, save_adapter
from rlplan.runtime.models.start_checkpoint import (
    load_language_model,
    load_scalar_model,
    merge_into_whole_model,
    save_policy,
)
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.spec.base import explain_write_errors, shorten_value
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import Role

PREFIX = "language_model."
"""Prefix of the policy's parameter names in the trained module; the value head's names have another prefix."""


def export_policy(run_folder: Path, out: Path, *, takes_best: bool = False) -> Resumption:
    """Write the policy of a run's last valid checkpoint, or of its best, into a new folder. Returns the checkpoint.

    Raises: SpecError.
    """
    with _new_folder(out):
        checkpoint = find_best(run_folder) if takes_best else find_checkpoint(run_folder)
        paths, job = checkpoint.paths(Role.POLICY), read_plan(run_folder / "plan.json").job
        # a run that starts from random weights, or trains a vision-language model, has its start weights here
        start = run_folder / "start_policy"
        model = _load_filled(start if start.is_dir() else Path(job.policy.path), job, paths)
        model.to(getattr(torch, job.training.dtype.value))
        source = MergedWeights(model) if job.training.trains_adapters else WeightSource(model)
        with explain_write_errors(out):
            save_policy(model.config, source, out, Path(job.policy.path))
            merge_into_whole_model(out, Path(job.policy.path))
            if job.training.trains_adapters:
                save_adapter(model, job, out / "adapter")
    return checkpoint


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Provide a new or empty folder for the block; restore its former state if the block fails. Raises: SpecError."""
    with explain_write_errors(out):
        is_there = out.exists() or out.is_symlink()
        if is_there and not (out.is_dir() and not any(out.iterdir())):
            raise SpecError(
                f"{out} already holds something" if out.is_dir() else f"{out} is no folder",
                where=str(out),
                rule="a policy is exported into a new or an empty folder",
                way_out="name another folder",
            )
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(out)  # nobody must load a policy that was written in part
            if is_there:
                out.mkdir()
        raise


def _load_filled(folder: Path, job: ResolvedJob, paths: Sequence[str]) -> Any:
    """Load the model from a folder and fill in the weights of a checkpoint's files. Raises: SpecError."""
    tp = job.training.tp
    shard_shapes = {parameter.name: parameter.shape for parameter in cut_autotp_parameters(job.load_model(), tp)}
    try:
        load = load_scalar_model if job.algorithm.declaration.trains_scalar else load_language_model
        model = load(str(folder), torch.float32)
    except Exception as error:  # the libraries raise nothing more specific
        raise SpecError(
            f"the run's initial policy cannot be loaded: {shorten_value(str(error), 200)}",
            where=str(folder),
            rule="the model's folder must still be where the run read it",
            way_out="put its files back",
        ) from None
    if job.training.trains_adapters:
        add_trained_adapter(model, job)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(Path(path))) for path in paths]
        _fill(model, [StoredStates(files, part_name(rank, tp)) for rank in range(tp)], shard_shapes)
    return model


@torch.no_grad()
def _fill(model: Any, stored: Sequence[StoredStates], shard_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Copy stored weights into the model.

    stored: one entry per tensor-parallel rank. shard_shapes: shapes of the shards that such a rank holds, by name.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = {name: shard_shapes.get(name, tuple(parameter.shape)) for name, parameter in trained.items()}
    for rank, states in enumerate(stored):
        part = part_name(rank, len(stored))
        states.check({PREFIX + name + part: list(shape) for name, shape in shapes.items()}, others_too=True)
        for name, parameter in trained.items():
            target, shard = parameter.data, torch.empty(shapes[name])
            states.fill(shard, MASTER, PREFIX + name + part)
            # the axis that AutoTP splits is the one along which the shard is shorter
            for axis, size in enumerate(shard.shape):
                target = target.narrow(axis, rank * size if size < target.shape[axis] else 0, size)
            target.copy_(shard)


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises: SpecError."""
        raise SpecError(
            message,
            where="command line",
            rule=self.format_usage().strip(),
            way_out=f"`{self.prog} --help` lists the arguments",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Arguments(
        prog="python -m rlplan.runtime.checkpoints.export",
        description="Write the policy of a run's last or best checkpoint as a Hugging Face folder.",
        epilog="Exit codes: 0 done, 2 the run, a checkpoint or OUT is wrong, 5 the disk is full, 70 a bug.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new or an empty folder")
    parser.add_argument("--best", action="store_true", help="the best checkpoint (checkpoints.best_metric)")
    try:
        options = parser.parse_args(arguments)
        checkpoint = export_policy(options.run_dir, options.out, takes_best=options.best)
    except RlplanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return InterruptedRunError.exit_code
    except Exception as error:
        print(f"a bug in rlplan: {type(error).__name__}: {error}\n  way out: report it", file=sys.stderr)
        return EXIT_BUG
    for problem in checkpoint.problems:
        print(f"{problem}; skipped", file=sys.stderr)
    print(f"the policy after step {checkpoint.step}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
