"""The process in which a job's environment answers: a loop over lines of JSON.

In: one line a question, {"messages": [...], "answer": "..."}. Out: one line an answer, {"observation": ...} or
{"reward": ...} as the function gave it, or {"error": "..."}. The first line out says whether the function was found.
What the function prints goes to the run's log. It is the job's own code, and runs with the user's rights.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from rlplan.runtime.processes.child_processes import die_with_parent
from rlplan.runtime.processes.safe_path import run_file


def main(file: str, function: str) -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is no answer
    answer, error = _found(file, function)
    _say(answers, {"error": error} if error else {})
    if answer is None:
        return
    for line in sys.stdin:
        question = json.loads(line)
        try:
            said = answer(question["messages"], question["answer"])
            _say(answers, {"said": said})
        except Exception as failure:
            _say(answers, {"error": f"{type(failure).__name__}: {failure}"})


def _found(file: str, function: str) -> tuple[Callable[..., Any] | None, str]:
    """(the function, why there is none)."""
    try:
        found = getattr(run_file(file, "job_environment"), function, None)
    except Exception as failure:
        return None, f"{type(failure).__name__}: {failure}"
    return (found, "") if callable(found) else (None, f"there is no function '{function}'")


def _say(answers: Any, what: dict[str, Any]) -> None:
    """Write a line; what JSON does not know is said to be so."""
    try:
        line = json.dumps(what)
    except (TypeError, ValueError) as failure:
        line = json.dumps({"error": f"the answer is not JSON: {failure}"})
    answers.write(line + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
