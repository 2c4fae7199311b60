"""Marks in words for what only running a script would tell, such as `$(date)` or the value of an unset variable.

In: a word. Out: whether all of it is known, and the word as people read it. A marked word is kept, so that whoever
needs its value can say which one is missing. Left out: what is unknown (shell/words.py, python/values.py).
"""

OPEN, CLOSE = "\ue000", "\ue001"
"""Marks around what is not known, of Unicode's private use."""


def unknown(text: str) -> str:
    """A part of a word that is not known, as the script has it.

    >>> is_known(unknown("$(date)")), shown("run-" + unknown("$(date)"))
    (False, 'run-$(date)')
    """
    return f"{OPEN}{text}{CLOSE}"


def is_known(word: str) -> bool:
    """Whether a word has no part that only running would tell."""
    return OPEN not in word


def shown(word: str) -> str:
    """A word as people read it."""
    return word.replace(OPEN, "").replace(CLOSE, "")
