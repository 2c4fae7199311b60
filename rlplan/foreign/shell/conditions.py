"""Evaluation of shell tests: `[ ... ]`, `[[ ... ]]` and `(( ... ))`, also joined by `&&` and `||`.

In: nodes of the grammar, expanded words. Out: true, false, or None where the result is known only at run time.
Left out: tests of files, commands as tests.
"""

import re
from typing import TYPE_CHECKING

from rlplan.foreign.shell.words import UnknownError, Words, get_text, match_pattern
from rlplan.foreign.unknown import CLOSE, OPEN, is_known, strip_marks

if TYPE_CHECKING:
    from tree_sitter import Node

_ARGUMENT = re.compile(rf"{OPEN}\$\{{?[1-9]\}}?{CLOSE}")
"""An argument of the script, which is empty: the script is read as started without arguments."""


def is_test(node: "Node") -> bool:
    """Whether a statement is only a test: `[ ... ]`, `[[ ... ]]` or `(( ... ))`."""
    return node.type == "test_command" or (node.type == "compound_statement" and get_text(node).startswith("(("))


def evaluate_test(node: "Node", words: Words) -> bool | None:
    """The result of a test; None where it is known only at run time."""
    kind, children = node.type, node.named_children
    if kind == "compound_statement" and is_test(node) and len(children) == 1:
        return _evaluate_arithmetic(children[0], words)
    if kind in ("test_command", "parenthesized_expression", "compound_statement", "subshell") and len(children) == 1:
        return evaluate_test(children[0], words)
    if kind == "negated_command" or (kind == "unary_expression" and node.children[0].type == "!"):
        inner = evaluate_test(children[-1], words)
        return None if inner is None else not inner
    if kind in ("list", "binary_expression") and len(node.children) == 3:
        sign = get_text(node.children[1])
        if sign in ("&&", "||", "-a", "-o"):
            pair = [evaluate_test(node.children[0], words), evaluate_test(node.children[2], words)]
            decisive = sign in ("||", "-o")
            return decisive if decisive in pair else None if None in pair else not decisive
        return _compare(node, sign, words)
    if kind == "unary_expression" and get_text(node.children[0]) in ("-z", "-n"):
        word = " ".join(words.fields(node.children[-1], quoted=True))
        if not is_known(word) and strip_marks(word) != get_text(node.children[-1]).strip("\"'"):
            return None  # the value is another program's output
        if get_text(node.children[-1]).strip("\"'").startswith("$") and not is_known(word):
            word = ""  # an unset variable is empty
        return bool(word) is (get_text(node.children[0]) == "-n")
    return {"true": True, "false": False}.get(get_text(node))


def _evaluate_arithmetic(node: "Node", words: Words) -> bool | None:
    try:
        return words.number(node) != 0
    except (UnknownError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _compare(node: "Node", sign: str, words: Words) -> bool | None:
    left, right = ("" if _ARGUMENT.fullmatch(word) else word for word in map(words.one, node.children[::2]))
    if not (is_known(left) and is_known(right)):
        return None
    if sign in ("=", "==", "!="):
        is_match = match_pattern(left, right)
        return None if is_match is None else is_match is (sign != "!=")
    try:
        pair = int(left), int(right)
    except ValueError:
        return None
    verdicts = {"-eq": pair[0] == pair[1], "-ne": pair[0] != pair[1], "-lt": pair[0] < pair[1]}
    verdicts |= {"-gt": pair[0] > pair[1], "-le": pair[0] <= pair[1], "-ge": pair[0] >= pair[1]}
    verdicts |= {"<": pair[0] < pair[1], ">": pair[0] > pair[1], "<=": pair[0] <= pair[1], ">=": pair[0] >= pair[1]}
    return verdicts.get(sign)
