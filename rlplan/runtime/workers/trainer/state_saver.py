"""StateSaver: writes and reads a trainer rank's part of a checkpoint.

In: a DeepSpeed engine, a folder. Out: one tensor file and a receipt per rank; or an engine with the saved state. Other
ranks and another ZeRO stage may have written that state. Left out: committing a checkpoint (checkpoints/folder.py).

With staging memory, states are copied first and written in the background, while training continues. The staging memory
stays allocated throughout the run. Without it, the trainer waits for the disk. On a GPU it is pinned host memory;
**not yet run on a GPU**.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from rlplan.errors import RlplanError
from rlplan.memory.trainers.checkpoints import MASTER_BYTES
from rlplan.runtime.checkpoints import eight_bit
from rlplan.runtime.checkpoints.fragments import MASTER, TrainedFragments
from rlplan.runtime.checkpoints.stored_states import StoredStates, view_bytes
from rlplan.runtime.checkpoints.tensor_file import Piece, TensorFile, write
from rlplan.runtime.device.cuda import CudaDevice
from rlplan.runtime.device.layer import device_of, present
from rlplan.runtime.weight_sync.source import is_sharded

HOST_RNG, DEVICE_RNG = "rng/cpu", "rng/cuda"
PIECE_TYPES = {torch.float32: "F32", torch.uint8: "U8"}
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of DeepSpeed's loss scaler in fp16."""


class StateSaver:
    """See the module docstring. One save at a time: the next one waits for the previous one."""

    def __init__(self) -> None:
        self._staging: torch.Tensor | None = None
        self._thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.untyped_storage().nbytes()

    def reserve(self, engine: Any) -> None:
        """Allocate the staging memory, for the lifetime of the process."""
        if self._staging is None:
            states = TrainedFragments(engine)
            size = MASTER_BYTES * len(states.kinds) * sum(fragment.numel for fragment in states.saved)
            size += eight_bit.num_bytes(states)
            device = _find_device(engine)
            self._staging = device.pinned(size) if device else torch.zeros(size, dtype=torch.uint8)

    def save(self, engine: Any, path: Path, *, waits: bool) -> None:
        """Write this rank's file, then its receipt. waits: write in the foreground, without staging memory."""
        self.finish()  # the previous write still reads the staging memory
        states = TrainedFragments(engine)
        facts = {"num_steps": states.num_steps, "scaler": _read_loss_scaler(engine)}
        pieces = list(self._pieces(states, copies=not waits)) + _generator_pieces(engine)
        if waits:
            _write_with_receipt(path, pieces, facts)
            return
        self._thread = threading.Thread(target=_write_with_receipt, args=(path, pieces, facts), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _pieces(self, states: TrainedFragments, *, copies: bool) -> Iterator[Piece]:
        used = 0
        for name, values in _iterate_tensors(states):
            source = values
            if copies:
                assert self._staging is not None, "reserve comes first"
                size = values.numel() * values.element_size()
                source = self._staging.narrow(0, used, size).copy_(values.view(torch.uint8))
                used += size
            elif values.device.type != "cpu":
                source = values.cpu()
            yield Piece(name, PIECE_TYPES[values.dtype], view_bytes(source))


def _iterate_tensors(states: TrainedFragments) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, flat tensor) of every state that this rank writes."""
    for kind in states.kinds:
        for fragment in states.saved:
            values = states.values(kind, fragment)
            if values is not None:
                yield f"{kind}/{fragment.name}@{fragment.start}", values
    yield from ((name, tensor.detach().view(-1)) for name, tensor in eight_bit.iterate_moments(states))


def restore_states(engine: Any, paths: Sequence[Path], own: Path, facts: dict[str, Any]) -> None:
    """Restore an engine's state. paths: the role's files of all ranks; own: this rank's file, if it wrote one.

    Raises: SpecError when the files hold other parameters.
    """
    states = TrainedFragments(engine)
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in paths]
        stored = StoredStates(files, states.part)
        stored.check(states.shapes())
        own_file = files[list(paths).index(own)] if own in paths else None
        if facts["num_steps"] and states.has_eight_bits:
            eight_bit.bring_back(states, own_file, facts["num_steps"])
        elif facts["num_steps"]:
            states.make_moments(facts["num_steps"])
        # Before the first optimizer step there are no moments, so only master weights were saved.
        for kind in states.kinds if facts["num_steps"] else (MASTER,):
            for fragment in states.held:
                values = states.values(kind, fragment)
                assert values is not None
                stored.fill(values, kind, fragment.name, fragment.start)
        _round_weights(states, stored)
        if own_file is not None:
            _set_generators(own_file)
    engine.global_steps = facts["num_steps"]
    for holder in _find_loss_scalers(engine):
        for name, value in facts["scaler"].items():
            setattr(holder, name, value)


@torch.no_grad()
def _round_weights(states: TrainedFragments, stored: StoredStates) -> None:
    """Copy the master weights into the weights of forward passes, with the rounding of an optimizer step."""
    owners = {id(fragment.owner) for fragment in states.held}
    shares = {fragment.name: fragment for fragment in states.held}
    for name, parameter in states.trained.items():
        if hasattr(parameter, "ds_tensor") and (share := shares.get(name)):  # ZeRO-3 partition, without its padding
            parameter.ds_tensor.view(-1).narrow(0, 0, share.numel).copy_(share.view(share.owner))
        if id(parameter) not in owners and not is_sharded(parameter):
            stored.fill(parameter.data, MASTER, name)


def _generator_pieces(engine: Any) -> list[Piece]:
    states, device = {HOST_RNG: torch.get_rng_state()}, _find_device(engine)
    if device is not None:
        states[DEVICE_RNG] = device.generator_state()
    return [Piece(name, "U8", memoryview(bytes(state.tolist()))) for name, state in states.items()]


def _find_device(engine: Any) -> CudaDevice | None:
    """The device of an engine's weights; None for host memory."""
    return device_of(next(engine.module.parameters()).device)


def _set_generators(file: TensorFile) -> None:
    device = present()
    for name, set_state in (
        (HOST_RNG, torch.set_rng_state),
        (DEVICE_RNG, device.set_generator_state if device else None),
    ):
        if name in file.tensors and set_state is not None:
            set_state(torch.tensor(list(file.read(name)), dtype=torch.uint8))


def _find_loss_scalers(engine: Any) -> list[Any]:
    """Objects that hold the loss scale in fp16: a separate scaler, or the optimizer's configuration."""
    zero = engine.optimizer
    holders = [getattr(zero, "loss_scaler", None), getattr(zero, "loss_scale_config", None)]
    return [holder for holder in holders if holder is not None and hasattr(holder, "cur_scale")]


def _read_loss_scaler(engine: Any) -> dict[str, float]:
    return {
        name: getattr(holder, name)
        for holder in _find_loss_scalers(engine)
        for name in SCALER_FIELDS
        if hasattr(holder, name)
    }


def _write_with_receipt(path: Path, pieces: Sequence[Piece], facts: dict[str, Any]) -> None:
    """Write the file, then a receipt that states its checksum or the error.

    If the disk is too full for a receipt, an empty one is created, which takes no space.
    """
    try:
        content = {**facts, "file": write(path, pieces).model_dump(), "error": ""}
    except Exception as error:
        content = {**facts, "error": error.what if isinstance(error, RlplanError) else f"{path.name}: {error}"}
    receipt = path.with_suffix(".receipt")
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(receipt)  # atomic, because the driver reads a receipt as soon as it exists
    except OSError:
        with suppress(OSError):  # without any receipt the driver would wait until its deadline
            partial.unlink(missing_ok=True)
            receipt.touch()
