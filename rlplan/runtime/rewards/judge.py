"""Judge: computes the rewards of one response, one reward after the other; each thread has its own Judge.

A Judge keeps the child processes of its rewards between responses. A reward function gets a batch of one response here;
functions that are called with whole batches belong to batches.py.

In: a response with its prompt. Out: a Verdict.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlplan.runtime.rewards.code_executor import grade_program
from rlplan.runtime.rewards.processes import RewardProcess
from rlplan.runtime.rewards.verdict import ExhaustedError, RewardFailure, Verdict
from rlplan.runtime.rewards.verifiers import WHITE_SPACE, check_format, extract_answer, match_answer
from rlplan.runtime.rollout.experience import Prompt
from rlplan.runtime.sandbox.programs import Sandbox
from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FormatCheckerSpec, FunctionSpec, RewardSpec
from rlplan.units import GIB

MATH_MEMORY = GIB
"""Memory limit of a process that compares mathematics, in bytes."""
MAX_MATH_TEXT = 4096
"""Most characters of an answer that is read as mathematics; a longer one is wrong."""


@dataclass(frozen=True, slots=True)
class Response:
    prompt: Prompt
    text: str
    tokens: tuple[int, ...] = ()


class Judge:
    """See the module docstring. sandbox: runs code; None when no reward needs it."""

    def __init__(self, rewards: Sequence[RewardSpec], sandbox: Sandbox | None) -> None:
        self.rewards, self.sandbox = rewards, sandbox
        self._processes: dict[str, RewardProcess] = {}
        for spec in rewards:
            if isinstance(spec, FunctionSpec):
                self._processes[spec.label] = make_function_process(spec)
            elif isinstance(spec, AnswerMatcherSpec) and spec.compares == "math":
                setting = {"kind": "math", "memory": MATH_MEMORY}
                self._processes[spec.label] = RewardProcess(spec.label, setting, spec.timeout_s)

    def start(self, columns: Collection[str] | None = None) -> None:
        """Start the processes. columns: columns that every row has. Raises: SpecError when a reward cannot work."""
        for process in self._processes.values():
            process.start(columns)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    @property
    def processes(self) -> Collection[RewardProcess]:
        return self._processes.values()

    def judge(self, response: Response) -> Verdict:
        """Compute the rewards up to the first that fails; a reward that returns None is left out."""
        start_s = time.time()
        values: dict[str, float] = {}
        notes: dict[str, int] = {}
        failure = ""
        for spec in self.rewards:
            try:
                value = self._compute_value(spec, response, notes)
                values |= {} if value is None else {spec.label: value}
            except ExhaustedError as error:
                values[spec.label], notes[f"{spec.label}/{error.note}"] = 0.0, 1
            except RewardFailure as error:
                failure = f"{spec.label}: {error.reason}"
                notes |= {f"{spec.label}/late": 1} if error.is_late and isinstance(spec, FunctionSpec) else {}
                break
        return Verdict(values, failure, notes, start_s, time.time())

    def _compute_value(self, spec: RewardSpec, response: Response, notes: dict[str, int]) -> float | None:
        match spec:
            case FormatCheckerSpec():
                return check_format(spec, response.text)
            case FunctionSpec():
                (answer,) = self._processes[spec.label].ask_batch([make_request(response)])
                if isinstance(answer, RewardFailure):
                    raise answer
                return answer
            case AnswerMatcherSpec():
                value, note = self._match_answer(spec, response)
            case CodeExecutorSpec():
                assert self.sandbox is not None, "a sandbox was opened"
                value, note = grade_program(spec, response.text, response.prompt, self.sandbox)
        if note:
            notes[f"{spec.label}/{note}"] = 1
        return value

    def _match_answer(self, spec: AnswerMatcherSpec, response: Response) -> tuple[float, str]:
        if spec.compares == "text":
            return match_answer(spec, response.text, response.prompt.answer), ""
        extracted, right = extract_answer(spec, response.text), response.prompt.answer.strip(WHITE_SPACE)
        if not extracted or extracted == right:
            return float(bool(extracted)), ""
        if len(extracted) > MAX_MATH_TEXT:
            return 0.0, "too_long"
        return self._processes[spec.label].ask({"text": extracted, "answer": right})


def make_function_process(spec: FunctionSpec) -> RewardProcess:
    setting = {"kind": "function", "path": spec.path, "signature": spec.signature, "memory": spec.memory}
    return RewardProcess(spec.label, setting, spec.timeout_s)


def make_request(response: Response) -> dict[str, object]:
    prompt = response.prompt
    return {
        "prompt": prompt.text,
        "chat": json.loads(prompt.messages or "null"),
        "text": response.text,
        "tokens": list(response.tokens),
        "answer": prompt.answer,
        "columns": json.loads(prompt.columns),
    }
