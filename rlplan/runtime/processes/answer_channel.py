"""AnswerChannel: the child's side of a LineProcess, which reads JSON requests and writes JSON answers.

Foreign code in the child must neither read requests nor print into the answers. Both pipes therefore move to private
descriptors, which its own child processes do not inherit, before any foreign code is loaded.

In: JSON lines on standard input. Out: JSON lines on the descriptor that was standard output.
"""

import json
import os
from collections.abc import Mapping
from typing import Any


class AnswerChannel:
    """See the module docstring. Standard input becomes empty; printed text goes to standard error, or is discarded."""

    def __init__(self, *, discards_prints: bool = False) -> None:
        self.requests, self.answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        if discards_prints:
            os.dup2(nowhere, 2)
        os.dup2(2, 1)
        os.close(nowhere)

    def send(self, answer: Mapping[str, Any], max_bytes: int | None = None) -> None:
        """Write one answer, cut off after `max_bytes`. Raises: TypeError, ValueError for values that JSON lacks."""
        left = memoryview(json.dumps(answer).encode()[:max_bytes] + b"\n")
        while left:
            left = left[os.write(self.answers, left) :]
