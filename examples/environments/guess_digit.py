"""A game for the sorter model: the environment thinks of a digit, the policy guesses, and hears whether it is larger.

The prompt is `Sort: 52914`; the digit is the last one of the prompt sorted, which is the largest: a policy that sorts
knows it. A turn's first digit is the guess. The reward is 1 at the first try and half of that at each later one.
The function sees all turns anew each time, and keeps nothing.
"""

from typing import Any

TRIES = 3


def play(messages: list[dict[str, str]], answer: str) -> dict[str, Any]:
    """messages: prompt, policy, environment, policy … with `role` and `content`. answer: the prompt's right answer."""
    wanted = int(answer[-1])
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    digits = [character for character in replies[-1] if character.isdigit()]
    guess = int(digits[0]) if digits else None
    if guess == wanted:
        return {"reward": 0.5 ** (len(replies) - 1)}
    if len(replies) == TRIES:
        return {"reward": 0.0}
    if guess is None:
        return {"observation": "?"}
    return {"observation": "+" if guess < wanted else "-"}
