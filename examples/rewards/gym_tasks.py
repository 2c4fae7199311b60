"""reasoning-gym: its tasks as rows, and its own scoring as a reward function of verl's signature.

In: a task's name. Out: JSONL rows; a score from 0 to 1. Needs the package `reasoning-gym`, which is no dependency.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

SEED_STRIDE = 10_000_000
"""reasoning-gym draws entry i with seed + i, so data sets of neighbouring seeds would share all entries but one."""


def rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a task; `extra_info` holds the whole entry, for scoring."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(task, size=size, seed=seed * SEED_STRIDE)
    return [
        {
            "id": f"{task}-{seed}-{index}",
            "prompt": entry["question"],
            "answer": str(entry["answer"]),
            "data_source": task,
            "extra_info": {"entry": json.loads(json.dumps(entry, default=str))},
        }
        for index, entry in enumerate(entries)
    ]


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The task's score of an answer; the answer stands in <answer> tags, or is the whole response."""
    import reasoning_gym

    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    answer = answers[-1].strip() if answers else solution_str.strip()
    return float(reasoning_gym.get_score_answer_fn(data_source)(answer, extra_info["entry"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    lines = [json.dumps(row) for row in rows(options.task, options.size, options.seed)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
