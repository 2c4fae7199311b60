"""Where a run stands: taken when a step has ended, and given back to the run that goes on from there.

In: the driver's parts that remember something over steps. Out: a RunState and the finished rollouts that no step has
taken; and back. Left out: trained states (checkpointer.py). The order of prompts and every request's seed follow from
the job's seed and the step, so nothing of them is kept.
"""

import json
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from rlplan.errors import SpecError
from rlplan.runtime.checkpoints.finding import Resumption
from rlplan.runtime.checkpoints.manifest import EXPERIENCE, ExpectedLength, RunState, StreamState
from rlplan.runtime.experience import FinishedRequest
from rlplan.runtime.fleet import Fleet
from rlplan.runtime.handover import Handover
from rlplan.runtime.rollout_stream import RolloutStream


def take_state(step: int, handover: Handover, fleet: Fleet, stream: RolloutStream | None) -> tuple[RunState, Any]:
    """(state, finished rollouts as JSON) at the end of a step."""
    stream_state, complete = (None, []) if stream is None else stream.state()
    lengths = fleet.lengths.by_prompt() if len(fleet.engines) > 1 else {}
    state = RunState(
        step=step,
        version=handover.version,
        mean_length=fleet.lengths.mean,
        lengths=tuple(ExpectedLength(prompt=prompt, tokens=tokens) for prompt, tokens in lengths.items()),
        stream=stream_state,
    )
    return state, [asdict(finished) for finished in complete]


def give_state(found: Resumption, handover: Handover, fleet: Fleet, stream: RolloutStream | None) -> str:
    """Restore what `take_state` took; says what is begun anew. The first hand-over makes the version the saved one."""
    state = found.state
    handover.version = state.version
    fleet.lengths.restore(state.mean_length, {each.prompt: each.tokens for each in state.lengths})
    if stream is None:
        count = 0 if state.stream is None else len(_untaken(state.stream))
        return f"{count} prompt(s) that generation was ahead are begun anew" if count else ""
    if state.stream is None:
        stream.begin_at(state.step)
        return ""
    stream.restore(state.stream, _read_experience(found), state.step)
    now = stream.state()[0]
    return f"{len(now.again)} prompt(s) that were under way are begun anew, {len(now.complete)} finished one(s) kept"


def check_order(found: Resumption, num_prompts: int) -> None:
    """For a run whose steps each generate their own rollouts, `num_prompts` of them: step n trains the n-th batch.

    Raises: SpecError when a run whose generation ran ahead has trained others, which would come again, and not these.
    """
    if found.state.stream is None:
        return
    untaken = _untaken(found.state.stream)
    if untaken != list(range(found.step * num_prompts, found.state.stream.num_begun)):
        raise SpecError(
            f"the run ran ahead and trained its prompts out of order: prompt {untaken[0]} is still to be trained",
            where=str(found.folder),
            rule="a run whose generation does not run ahead trains prompts in order, each once",
            way_out="resume with placement.max_staleness=1 or more, or from another checkpoint",
        )


def _untaken(stream: StreamState) -> list[int]:
    """Prompts that were begun and that no step has taken."""
    return sorted((*stream.again, *stream.complete))


def _read_experience(found: Resumption) -> tuple[FinishedRequest, ...]:
    """Raises: SpecError when it holds something else."""
    path = found.folder / EXPERIENCE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return TypeAdapter(tuple[FinishedRequest, ...]).validate_python(data)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{EXPERIENCE} holds no finished rollouts: {str(error).splitlines()[0]}",
            where=str(path),
            rule="what a run of this version of rlplan wrote",
            way_out="resume from another checkpoint",
        ) from None
