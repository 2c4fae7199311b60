"""Facts about a job's data for the planner and the user: the files read, and the lengths of prompts and responses.

In: tokenized prompts, finished rollouts. Out: plain values; `response_lengths` can be pasted into a job unchanged.
"""

from collections import Counter

from rlplan.runtime.data.prompt_sets import PromptSets
from rlplan.spec.parts.lengths import build_histogram


def collect_data_facts(prompts: PromptSets) -> dict[str, object]:
    """The content of data.json: lines about the files, and the prompt lengths in tokens."""
    lengths = [len(prompt.tokens) for prompt in prompts.train]
    return {
        "schema_version": 1,
        "read": list(prompts.log_lines),
        "num_prompts": len(lengths),
        "num_heldout_prompts": len(prompts.heldout),
        "prompt_len": {"mean": round(sum(lengths) / len(lengths), 3), "max": max(lengths)},
        "prompt_lengths": build_histogram(lengths).model_dump(mode="json"),
    }


def summarize_lengths(counts: Counter[int]) -> dict[str, object]:
    """`workload.response_lengths` and the mean length. counts: number of responses by length; at least one."""
    mean = sum(length * count for length, count in counts.items()) / counts.total()
    return {
        "mean_response_len": max(1, round(mean)),
        "response_lengths": build_histogram(sorted(counts.elements())).model_dump(mode="json"),
    }
