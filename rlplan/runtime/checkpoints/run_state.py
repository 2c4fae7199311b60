"""Where a run stands: taken when a step has ended, and given back to the run that goes on from there.

In: the driver's parts that remember something over steps. Out: a RunState and the buffer's finished rollouts, which no
step has taken; and back. Left out: trained states (checkpointer.py). The order of prompts and every request's seed
follow from the job's seed and the prompt's number, so nothing of them is kept.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlplan.errors import SpecError
from rlplan.reading import MAX_RUN_BYTES, read_bytes
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, RunState, StreamState
from rlplan.runtime.rollout.buffer import numbers_of
from rlplan.runtime.rollout.fleet import Fleet
from rlplan.runtime.rollout.rollout_stream import RolloutStream
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync


def take_state(step: int, weight_sync: WeightSync, fleet: Fleet, stream: RolloutStream | None) -> tuple[RunState, Any]:
    """(state, the buffer as JSON) at the end of a step."""
    stream_state, buffer = (None, {}) if stream is None else stream.state()
    lengths = fleet.lengths.by_prompt if len(fleet.engines) > 1 else {}
    state = RunState(
        step=step,
        version=weight_sync.version,
        mean_length=fleet.lengths.mean,
        lengths=tuple(lengths.items()),
        stream=stream_state,
    )
    return state, buffer


def give_state(found: Resumption, weight_sync: WeightSync, fleet: Fleet, stream: RolloutStream | None) -> str:
    """Restore what `take_state` took; says what begins anew. The first weight sync makes the version the saved one."""
    state = found.state
    weight_sync.version = state.version
    fleet.lengths.mean = state.mean_length
    fleet.lengths.by_prompt = dict(state.lengths)
    if stream is None:
        count = 0 if state.stream is None else len(_untaken(found, state.stream))
        return f"{count} prompt(s) that generation was ahead are begun anew" if count else ""
    if state.stream is None:
        stream.begin_at(state.step, state.num_replaced)
        return ""
    with _reading(found) as buffer:
        stream.restore(state.stream, buffer, state.step)
    again = len(stream.state()[0].again)
    return f"{again} prompt(s) that were under way are begun anew, {len(stream.buffer)} finished one(s) kept"


def check_order(found: Resumption, num_prompts: int) -> None:
    """For a run whose steps each generate their own rollouts: each takes the next prompts, `num_prompts` at least.

    Raises: SpecError when a run whose generation ran ahead has trained later ones, which would come again, before them.
    """
    stream = found.state.stream
    if stream is None:
        return
    untaken = _untaken(found, stream)
    if untaken != list(range(found.step * num_prompts + stream.num_replaced, stream.num_begun)):
        raise SpecError(
            f"the run ran ahead and trained its prompts out of order: {len(untaken)} are left of {stream.num_begun}, "
            f"the first is prompt {min(untaken, default=stream.num_begun)}",
            where=str(found.folder),
            rule="a run whose generation does not run ahead trains prompts in order, each once",
            way_out="resume with placement.max_staleness=1 or more, or from another checkpoint",
        )


def _untaken(found: Resumption, stream: StreamState) -> list[int]:
    """Prompts that were begun and that no step has taken."""
    with _reading(found) as buffer:
        return sorted([*stream.again, *numbers_of(buffer)])


@contextmanager
def _reading(found: Resumption) -> Iterator[Any]:
    """The buffer as JSON, for the block. Raises: SpecError when the block cannot read it as one."""
    path = found.folder / EXPERIENCE
    try:
        yield json.loads(read_bytes(path, EXPERIENCE, limit=MAX_RUN_BYTES))
    except (ValueError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"{EXPERIENCE} holds no buffer of rollouts: {str(error).splitlines()[0]}",
            where=str(path),
            rule="what a run of this version of rlplan wrote",
            way_out="resume from another checkpoint",
        ) from None
