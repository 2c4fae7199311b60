"""A tool for the caller model: a table that a model cannot know."""

import hashlib


def look_up(code: str) -> str:
    """Gives the entry that stands under a code.

    Args:
        code: Five digits.
    """
    if len(code) != 5 or not code.isdigit():
        raise ValueError(f"{code} is no code of five digits")
    return f"{int(hashlib.sha256(code.encode()).hexdigest(), 16) % 1000:03}"
