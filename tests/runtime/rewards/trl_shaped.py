"""Reward functions of the shapes that TRL's have: of messages, token ids or a whole batch, async, and built ones."""

import asyncio
import os

LOOPS = set()
SIZES = []


def has_thoughts(completions, **columns):
    """Each completion of a chat is a list of messages."""
    return [float(completion[0]["content"].startswith("<think>")) for completion in completions]


def says_role(prompts, completions, **columns):
    return [
        float(prompt[-1]["role"] == "user" and completion[0]["role"] == "assistant")
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def is_text(prompts, completions, **columns):
    return [
        float(isinstance(prompt, str) and isinstance(completion, str))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def best_of_batch(completions, **columns):
    """Only the longest text of the whole batch is worth something."""
    longest = max(map(len, completions))
    return [float(len(text) == longest) for text in completions]


def num_calls(completions, **columns):
    SIZES.append(len(completions))
    return [100.0 * len(SIZES) + size for size in [len(completions)] * len(completions)]


async def one_loop(completions, **columns):
    LOOPS.add(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return [float(len(LOOPS))] * len(completions)


def unless_hard(completions, level, **columns):
    return [None if hard else 1.0 for hard in level]


def never(completions, **columns):
    return [None] * len(completions)


def is_online(completions, **columns):
    return [float("HF_HUB_OFFLINE" not in os.environ)] * len(completions)


def progress(completions, level, trainer_state, log_extra, log_metric, **columns):
    log_extra("level", list(level))
    log_metric("mean", 1.0)
    return [trainer_state.global_step + 10 * trainer_state.max_steps + 100 * each for each in level]


class _TooLong:
    __name__ = "too_long"

    def __init__(self, most):
        self.most = most

    def __call__(self, completion_ids, **columns):
        return [-float(len(ids) > self.most) for ids in completion_ids]


too_long = _TooLong(2)


async def sorts_alone(data_source, solution_str, ground_truth):
    """verl's, one response a call."""
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)
