"""Where a run stands: taken when a step has ended, and given back to the run that goes on from there.

In: the driver's parts that remember something over steps. Out: a RunState and the buffer's finished rollouts, which no
step has taken; and back. Left out: trained states (checkpointer.py). The order of prompts and every request's seed
follow from the job's seed and the prompt's number, so nothing of them is kept.
"""

import json
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, ExpectedLength, RunState, StreamState
from rlplan.runtime.fleet import Fleet
from rlplan.runtime.handover import Handover
from rlplan.runtime.rollout_stream import RolloutStream


def take_state(step: int, handover: Handover, fleet: Fleet, stream: RolloutStream | None) -> tuple[RunState, Any]:
    """(state, the buffer as JSON) at the end of a step."""
    stream_state, buffer = (None, {}) if stream is None else stream.state()
    lengths = fleet.lengths.by_prompt() if len(fleet.engines) > 1 else {}
    state = RunState(
        step=step,
        version=handover.version,
        mean_length=fleet.lengths.mean,
        lengths=tuple(ExpectedLength(prompt=prompt, tokens=tokens) for prompt, tokens in lengths.items()),
        stream=stream_state,
    )
    return state, buffer


def give_state(found: Resumption, handover: Handover, fleet: Fleet, stream: RolloutStream | None) -> str:
    """Restore what `take_state` took; says what is begun anew. The first hand-over makes the version the saved one."""
    state = found.state
    handover.version = state.version
    fleet.lengths.restore(state.mean_length, {each.prompt: each.tokens for each in state.lengths})
    if stream is None:
        return ""
    if state.stream is None:
        stream.begin_at(state.step, state.num_replaced)
        return ""
    _restore(stream, state.stream, found)
    return (
        f"{len(state.stream.again)} prompt(s) that were under way are begun anew, "
        f"{len(stream.buffer)} finished one(s) kept"
    )


def _restore(stream: RolloutStream, state: StreamState, found: Resumption) -> None:
    """Raises: SpecError when the buffer's file holds something else."""
    path = found.folder / EXPERIENCE
    try:
        stream.restore(state, json.loads(path.read_text(encoding="utf-8")), found.state.step)
    except (ValueError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"{EXPERIENCE} holds no buffer of rollouts: {str(error).splitlines()[0]}",
            where=str(path),
            rule="what a run of this version of rlplan wrote",
            way_out="resume from another checkpoint",
        ) from None
