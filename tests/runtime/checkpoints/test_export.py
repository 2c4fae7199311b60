"""Export: whole tensors out of what ranks saved of them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplan.errors import SpecError
from rlplan.memory.gpu.states import autotp_parameters
from rlplan.runtime.checkpoints import export
from rlplan.runtime.checkpoints.fragments import part_name
from rlplan.runtime.checkpoints.stored_states import StoredStates, memory_of
from rlplan.runtime.checkpoints.tensor_file import Piece, TensorFile, write
from rlplan.runtime.start_checkpoint import load_language_model
from tests.factories import EXAMPLES, make_job

SORTER = str(EXAMPLES / "models" / "sorter")


def part_of(whole: torch.Tensor, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """What one of two ranks has: a half along the axis that is cut, or everything."""
    for axis, size in enumerate(shape):
        whole = whole.narrow(axis, rank * size if size < whole.shape[axis] else 0, size)
    return whole.contiguous()


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, dict[str, tuple[int, ...]], list[Path]]:
    """A model, what a rank of two has of it, and the files that these wrote."""
    model = load_language_model(SORTER, torch.float32)
    held = {parameter.name: parameter.shape for parameter in autotp_parameters(make_job().load_model(), 2)}
    paths = [tmp_path / f"policy-{rank}" for rank in range(2)]
    for rank, path in enumerate(paths):
        own = {name: part_of(p.detach(), held[name], rank) for name, p in model.named_parameters()}
        write(
            path,
            [
                Piece(f"master/{export.PREFIX}{name}{part_name(rank, 2)}@0", "F32", memory_of(tensor))
                for name, tensor in own.items()
            ],
        )
    return model, held, paths


def test_parts_of_ranks_that_share_layers_become_whole_tensors(parts: Any) -> None:
    model, held, paths = parts
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert any(held[name] != tuple(tensor.shape) for name, tensor in before.items())
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        export._fill(model, [StoredStates(files, part_name(rank, 2)) for rank in range(2)], held)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_rank_alone_does_not_take_parts_for_whole_tensors(parts: Any) -> None:
    model, _, paths = parts
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        with pytest.raises(SpecError, match="of another model"):
            export._fill(model, [StoredStates(files)], {})
