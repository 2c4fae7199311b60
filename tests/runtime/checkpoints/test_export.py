"""Export: whole tensors out of what ranks saved of them."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplan.errors import SpecError
from rlplan.memory.trainers.training import cut_autotp_parameters
from rlplan.planner.plan import read_plan, write_plan
from rlplan.runtime.checkpoints import export
from rlplan.runtime.checkpoints.folder import CheckpointFolder, write_durably
from rlplan.runtime.checkpoints.fragments import part_name
from rlplan.runtime.checkpoints.manifest import BEST, RUN, Manifest, RoleStates, RunState
from rlplan.runtime.checkpoints.stored_states import StoredStates, view_bytes
from rlplan.runtime.checkpoints.tensor_file import Piece, TensorFile, compute_digest, write
from rlplan.runtime.models.start_checkpoint import load_language_model
from tests.factories import EXAMPLES, make_job, make_plan

SORTER = str(EXAMPLES / "models" / "sorter")


def part_of(whole: torch.Tensor, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """The shard of one of two ranks: a half along the axis that is cut, or everything."""
    for axis, size in enumerate(shape):
        whole = whole.narrow(axis, rank * size if size < whole.shape[axis] else 0, size)
    return whole.contiguous()


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, dict[str, tuple[int, ...]], list[Path]]:
    """A model, what a rank of two has of it, and the files that these wrote."""
    model = load_language_model(SORTER, torch.float32)
    held_bytes = {parameter.name: parameter.shape for parameter in cut_autotp_parameters(make_job().load_model(), 2)}
    paths = [tmp_path / f"policy-{rank}" for rank in range(2)]
    for rank, path in enumerate(paths):
        own = {name: part_of(p.detach(), held_bytes[name], rank) for name, p in model.named_parameters()}
        write(
            path,
            [
                Piece(f"master/{export.PREFIX}{name}{part_name(rank, 2)}@0", "F32", view_bytes(tensor))
                for name, tensor in own.items()
            ],
        )
    return model, held_bytes, paths


def test_parts_of_ranks_that_share_layers_become_whole_tensors(parts: Any) -> None:
    model, held_bytes, paths = parts
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert any(held_bytes[name] != tuple(tensor.shape) for name, tensor in before.items())
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        export._fill(model, [StoredStates(files, part_name(rank, 2)) for rank in range(2)], held_bytes)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_rank_alone_does_not_take_parts_for_whole_tensors(parts: Any) -> None:
    model, _, paths = parts
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        with pytest.raises(SpecError, match="belongs to another model"):
            export._fill(model, [StoredStates(files)], {})


STATES = "policy-00000-of-00001.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the sorter's own weights as the checkpoints of steps 1 and 2."""
    folder = tmp_path / "run"
    checkpoints, model = CheckpointFolder(folder, 2), load_language_model(SORTER, torch.float32)
    for step in (1, 2):
        staged = checkpoints.stage(step)
        names = [(f"master/{export.PREFIX}{name}@0", p.detach()) for name, p in model.named_parameters()]
        write(staged / STATES, [Piece(name, "F32", view_bytes(tensor)) for name, tensor in names])
        write_durably(staged / RUN, RunState(step=step, version=step))
        files = {name: compute_digest(staged / name) for name in (STATES, RUN)}
        roles = {"policy": RoleStates(files=(STATES,), num_steps=step)}
        checkpoints.commit(staged, Manifest(job="a", step=step, identity={}, files=files, roles=roles))
    write_plan(make_plan(), folder / "plan.json")
    return folder


def test_the_command_writes_the_policy_and_says_what_it_passed_over(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(run / "checkpoints" / "step-000002" / STATES, 10)
    out = tmp_path / "out"
    assert export.main([str(run), str(out)]) == 0
    message = capsys.readouterr()
    assert message.out == f"the policy after step 1: {out}\n"
    assert f"step-000002: {STATES} has 10 bytes instead of " in message.err
    assert message.err.endswith("; skipped\n")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}


def test_the_best_checkpoint_is_exported_where_the_run_kept_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["--best", str(run), str(tmp_path / "none")], capsys, "has kept no best checkpoint")
    (run / "checkpoints" / BEST).write_text('{"schema_version": 1, "checkpoint": "step-000001"}')
    out = tmp_path / "out"
    assert export.main(["--best", str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"the policy after step 1: {out}\n"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """Exit code 2 and one message of four parts."""
    assert export.main(arguments) == 2
    message = capsys.readouterr()
    assert message.out == ""
    lines = message.err.splitlines()
    assert lines[0].startswith("error: ")
    assert [line.split(":")[0] for line in lines[1:]] == ["  where", "  rule", "  way out"]
    for word in words:
        assert word in message.err


def test_a_wrong_command_line_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    refused([], capsys, "required: RUN_DIR, OUT", "usage: python -m rlplan.runtime.checkpoints.export")
    refused(["a", "b", "c"], capsys, "unrecognized arguments: c")
    with pytest.raises(SystemExit) as ended:
        export.main(["--help"])
    assert ended.value.code == 0
    assert "RUN_DIR" in capsys.readouterr().out


def test_a_run_without_a_policy_to_export_is_one_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    refused([str(tmp_path / "nowhere"), str(out)], capsys, "nowhere does not exist")
    plan = read_plan(run / "plan.json")
    moved = plan.job.model_copy(update={"policy": plan.job.policy.model_copy(update={"path": "/moved/away"})})
    write_plan(plan.model_copy(update={"job": moved}), run / "plan.json")
    refused([str(run), str(out)], capsys, "moved/away")
    for step in (1, 2):
        os.truncate(run / "checkpoints" / f"step-00000{step}" / STATES, 10)
    refused([str(run), str(out)], capsys, "step-000002: ", "step-000001: ")
    assert not out.exists(), "nothing stays where nothing was exported"


def test_the_place_is_looked_at_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    nowhere = str(tmp_path / "nowhere")
    refused([nowhere, str(tmp_path / "file")], capsys, "file is no folder")
    refused([nowhere, str(tmp_path / "full")], capsys, "full already holds something")
    refused([nowhere, str(tmp_path / "file" / "x")], capsys, "cannot be written: Not a directory")
    (tmp_path / "empty").mkdir()
    refused([nowhere, str(tmp_path / "empty")], capsys, "nowhere does not exist")
    assert list((tmp_path / "empty").iterdir()) == []
