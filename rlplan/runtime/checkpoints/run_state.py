"""The run's state at the end of a step: saved into a checkpoint, and restored by a resumed run.

The order of prompts and every request's seed follow from the job's seed and the prompt's number, so they are not saved.
In: the driver's stateful parts. Out: a RunState and the buffer's finished rollouts that no step has trained on yet.
Left out: trained states (checkpointer.py).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlplan.errors import SpecError
from rlplan.reading import MAX_RUN_BYTES, read_bytes
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, RunState, StreamState
from rlplan.runtime.rollout.buffer import list_buffered_prompts
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.rollout.rollout_stream import RolloutStream
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync


def take_state(step: int, weight_sync: WeightSync, fleet: Fleet, stream: RolloutStream | None) -> tuple[RunState, Any]:
    """Collect (state, the buffer as JSON) at the end of a step."""
    stream_state, buffer = (None, {}) if stream is None else stream.state()
    # expected lengths only balance prompts over several engines
    lengths = fleet.lengths.by_prompt if len(fleet.engines) > 1 else {}
    state = RunState(
        step=step,
        version=weight_sync.version,
        mean_length=fleet.lengths.mean,
        lengths=tuple(lengths.items()),
        stream=stream_state,
    )
    return state, buffer


def restore_state(checkpoint: Resumption, weight_sync: WeightSync, fleet: Fleet, stream: RolloutStream | None) -> str:
    """Restore what `take_state` collected. Returns a sentence on the prompts that are generated again, or nothing."""
    state = checkpoint.state
    weight_sync.version = state.version
    fleet.lengths.mean = state.mean_length
    fleet.lengths.by_prompt = dict(state.lengths)
    if stream is None:
        count = 0 if state.stream is None else len(_list_untaken(checkpoint, state.stream))
        return f"{count} prompt(s) that were generated ahead are generated again" if count else ""
    if state.stream is None:
        stream.start_after(state.step, state.num_replaced)
        return ""
    with _reading(checkpoint) as buffer:
        stream.restore(state.stream, buffer, state.step)
    again = len(stream.state()[0].again)
    return f"{again} prompt(s) that were in flight are generated again, {len(stream.buffer)} finished one(s) kept"


def check_order(checkpoint: Resumption, num_prompts: int) -> None:
    """Check that a synchronous run can resume from the checkpoint: its steps must take prompts in order, each once.

    An asynchronous run may have trained later prompts before earlier ones; in a synchronous run they would be trained
    twice. Raises: SpecError.
    """
    stream = checkpoint.state.stream
    if stream is None:
        return
    untaken = _list_untaken(checkpoint, stream)
    if untaken != list(range(checkpoint.step * num_prompts + stream.num_replaced, stream.num_begun)):
        raise SpecError(
            f"the asynchronous run trained its prompts out of order: {len(untaken)} of {stream.num_begun} are left, "
            f"the first is prompt {min(untaken, default=stream.num_begun)}",
            where=str(checkpoint.folder),
            rule="a synchronous run trains prompts in order, each once",
            way_out="resume with placement.max_staleness=1 or more, or from another checkpoint",
        )


def _list_untaken(checkpoint: Resumption, stream: StreamState) -> list[int]:
    """Numbers of prompts that were started and that no step has taken."""
    with _reading(checkpoint) as buffer:
        return sorted([*stream.again, *list_buffered_prompts(buffer)])


@contextmanager
def _reading(checkpoint: Resumption) -> Iterator[Any]:
    """Read the buffer's JSON for the block. Raises: SpecError when the block finds that it is not a buffer."""
    path = checkpoint.folder / EXPERIENCE
    try:
        yield json.loads(read_bytes(path, EXPERIENCE, limit=MAX_RUN_BYTES))
    except (ValueError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"{EXPERIENCE} is not a rollout buffer: {str(error).splitlines()[0]}",
            where=str(path),
            rule="a file that this version of rlplan wrote",
            way_out="resume from another checkpoint",
        ) from None
