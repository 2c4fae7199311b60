"""Marks around parts of a word that are known only when a script runs, such as `$(date)` or an unset variable.

In: a word. Out: whether all of it is known, and the word as people read it. A marked word is kept, so that a reader
that needs its value can name the missing part. Left out: which parts are unknown (shell/words.py, python/values.py).
"""

import re

OPEN, CLOSE = "\ue000", "\ue001"
"""Marks around unknown parts, from Unicode's private use area."""
MAX_MARKED = 400


def mark_unknown(text: str) -> str:
    """The source text of an unknown part, marked; its beginning where it is long.

    >>> is_known(mark_unknown("$(date)")), strip_marks("run-" + mark_unknown("$(date)"))
    (False, 'run-$(date)')
    """
    return f"{OPEN}{text[:MAX_MARKED]}{CLOSE}"


def split_words(text: str) -> list[str]:
    """The words of a text between spaces, as bash splits an expansion; an unknown part is never split.

    >>> split_words("a=1 b=" + mark_unknown("$(date +%F)") + "/c") == ["a=1", "b=" + mark_unknown("$(date +%F)") + "/c"]
    True
    """
    return re.findall(f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|\\S)+", text)


def is_known(word: str) -> bool:
    """Whether a word has no unknown part."""
    return OPEN not in word


def is_wholly_unknown(value: object) -> bool:
    """Whether a value is one unknown part and nothing else.

    >>> is_wholly_unknown(mark_unknown("size")), is_wholly_unknown("Qwen/" + mark_unknown("size"))
    (True, False)
    """
    return isinstance(value, str) and value.startswith(OPEN) and value.find(CLOSE) == len(value) - 1


def strip_marks(word: str) -> str:
    """A word without marks, for messages."""
    return word.replace(OPEN, "").replace(CLOSE, "")
