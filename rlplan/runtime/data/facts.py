"""Facts about a job's data, as the planner and people want them: what was read, and how long prompts and responses are.

In: tokenized prompts, finished rollouts. Out: plain values; `response_lengths` can be pasted into a job as it stands.
"""

from collections import Counter
from collections.abc import Iterable

from rlplan.runtime.driver.preflight import PromptSets
from rlplan.spec.parts.lengths import histogram_of


def data_facts(prompts: PromptSets) -> dict[str, object]:
    """data.json: lines about the files, and the lengths of prompts in tokens."""
    lengths = [len(prompt.tokens) for prompt in prompts.train]
    return {
        "schema_version": 1,
        "read": list(prompts.said),
        "num_prompts": len(lengths),
        "num_heldout_prompts": len(prompts.heldout),
        "prompt_len": {"mean": round(sum(lengths) / len(lengths), 3), "max": max(lengths)},
        "prompt_lengths": histogram_of(lengths).model_dump(mode="json"),
    }


class ResponseLengths:
    """Lengths of responses of a whole run, counted."""

    def __init__(self, counts: Iterable[tuple[int, int]] = ()) -> None:
        self._counts: Counter[int] = Counter(dict(counts))

    def add(self, length: int) -> None:
        self._counts[length] += 1

    def counts(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self._counts.items()))

    def as_json(self) -> dict[str, object] | None:
        """`workload.response_lengths` and the mean, or None before the first response."""
        if not self._counts:
            return None
        mean = sum(length * count for length, count in self._counts.items()) / self._counts.total()
        return {
            "mean_response_len": max(1, round(mean)),
            "response_lengths": histogram_of(sorted(self._counts.elements())).model_dump(mode="json"),
        }
