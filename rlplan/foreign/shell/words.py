"""Expansion of shell words as in bash: variables, arrays, `${X:-default}`, `$((2 * 1024))` and quotes.

In: nodes of the grammar, variables. Out: words. A part that is known only at run time (`$(date)`, an unset variable)
stays in the word between two marks (foreign/unknown.py). Nothing is executed.
"""

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from rlplan.errors import SpecError
from rlplan.foreign.unknown import is_known, mark_unknown, split_words

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_WORD = 1 << 16
"""Characters of a word; a longer one is unknown."""
MAX_WORK = 200_000
"""Words, and blocks of CHARACTERS characters, that a script and its files are expanded to in all."""
CHARACTERS = 64
MAX_MATCHING, MAX_PATTERN = 1_000_000, 500
"""Characters that are compared with a pattern, counted as often as it may return to them, and length of a pattern."""
MAX_NUMBER = 1 << 63
_SUBSTITUTION = re.compile(r"s([#/|,@])([\w /-]+)\1([\w ./-]*)\1(g?)")
"""A command of `sed` that replaces plain text."""
Value = str | list[str]
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<<": lambda a, b: a << min(b, 63) if b >= 0 else 0,
    ">>": lambda a, b: a >> min(b, 63) if b >= 0 else 0,
    "**": lambda a, b: a**b if 0 <= b < 64 else 0,
    "/": lambda a, b: _divide_integers(a, b),
    "%": lambda a, b: a - b * _divide_integers(a, b),
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
}


def _divide_integers(a: int, b: int) -> int:
    """The quotient rounded towards zero, as in C.

    >>> _divide_integers(-7, 2), _divide_integers((1 << 62) + 1, 3)
    (-3, 1537228672809129301)
    """
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


class UnknownError(Exception):
    """Raised for a number that is known only at run time."""


def get_text(node: "Node") -> str:
    """The source of a node."""
    return (node.text or b"").decode("utf-8", "replace")


class Words:
    """Expansion with the variables of a script. substitute: gives the text of a `$(...)`, or None."""

    def __init__(self, variables: dict[str, Value], substitute: "Callable[[Node], str | None]") -> None:
        self.variables, self._substitute = variables, substitute
        self.spent, self.file = 0, ""

    def spend(self, num_words: int, num_characters: int = 0) -> None:
        """Count work. Raises: SpecError beyond MAX_WORK."""
        self.spent += num_words + num_characters // CHARACTERS
        if self.spent > MAX_WORK:
            raise SpecError(
                f"the script expands to more than {MAX_WORK:,} words, or to very long ones",
                where=self.file,
                rule=f"at most {MAX_WORK:,} words, loops and functions counted as often as they run",
                way_out="write the command that starts the training into a file of its own",
            )

    def one(self, node: "Node") -> str:
        """The expansion of a node as one word without splitting, as on the right of `=`."""
        words = self.fields(node, quoted=True)
        return words[0] if len(words) == 1 else _shorten(" ".join(words))

    def fields(self, node: "Node", *, quoted: bool = False) -> list[str]:
        """The words that a node expands to: none, one, or one per element of an array."""
        words = self._expand_node(node, quoted=quoted)
        self.spend(1 + len(words), sum(map(len, words)))
        return words

    def _expand_node(self, node: "Node", *, quoted: bool) -> list[str]:
        kind, source = node.type, get_text(node)
        if kind == "comment":
            return []
        if kind == "raw_string":
            return [source.lstrip()[1:-1]]
        if kind == "ansi_c_string":
            return [source.lstrip()[2:-1]]
        if kind == "string":
            return self._expand_quoted(node)
        if kind == "concatenation":
            return _join([self.fields(child, quoted=quoted) for child in node.children])
        if kind == "command_substitution":
            text = self._substitute(node)
            return [mark_unknown(source) if text is None else text]
        if kind in ("simple_expansion", "expansion", "arithmetic_expansion"):
            start = source.find("$")
            values = self._expand(node, source[start:])
            if not quoted:
                values = [part for value in values for part in split_words(value)]
            return _join([[source[:start]], values]) if source[:start].strip() or quoted else values
        if kind == "process_substitution":
            return [mark_unknown(source)]
        return [_unescape(source)]

    def _expand_quoted(self, node: "Node") -> list[str]:
        """The words of a text in double quotes; bytes between the grammar's nodes are text too."""
        source, start = node.text or b"", node.start_byte
        parts: list[list[str]] = []
        at = start + source.find(b'"') + 1
        for child in node.children:
            if child.type == '"':
                continue
            parts.append([_unescape(source[at - start : child.start_byte - start].decode("utf-8", "replace"), True)])
            if child.type == "string_content":
                parts.append([_unescape(get_text(child), True)])
            else:
                parts.append(self.fields(child, quoted=True))
            at = child.end_byte
        tail = source[at - start : max(at - start, len(source) - 1)]
        parts.append([_unescape(tail.decode("utf-8", "replace"), True)])
        arrays = [child for child in node.children if "[@]" in get_text(child) or get_text(child).strip() == "$@"]
        joined = _join(parts)
        return [] if arrays and joined == [""] else joined or [""]

    def _expand(self, node: "Node", source: str) -> list[str]:
        if node.type == "arithmetic_expansion":
            try:
                return [str(self.number(child)) for child in node.named_children[-1:]]
            except (UnknownError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
                return [mark_unknown(source)]
        if node.type == "simple_expansion":
            return self._expand_variable(source[1:].strip("{}"), source)
        return self._expand_braces(node, source)

    def _expand_variable(self, name: str, source: str) -> list[str]:
        if name in ("@", "*"):
            words = self.variables.get("@", [])
            self.spend(len(words))
            return list(words) if isinstance(words, list) else [words]
        value = self.variables.get(name)
        if value is None:
            return [mark_unknown(source)]
        return [value] if isinstance(value, str) else value[:1]

    def _expand_braces(self, node: "Node", source: str) -> list[str]:
        """The words of `${...}`: a variable or an element, with its operation."""
        inside = [child for child in node.children if child.type not in ("${", "}")]
        prefix = inside.pop(0).type if inside and inside[0].type in ("#", "!") else ""
        if not inside:
            return [mark_unknown(source)]
        subject, rest = inside[0], inside[1:]
        name, index = get_text(subject), None
        if subject.type == "subscript":
            parts = subject.named_children
            name, index = get_text(parts[0]), get_text(parts[1]) if len(parts) > 1 else "0"
        value = self.variables.get(name)
        if prefix == "!":
            return [mark_unknown(source)]
        if prefix == "#":
            return [str(len(value))] if value is not None else ["0" if index == "@" else mark_unknown(source)]
        if index in ("@", "*"):
            self.spend(len(value or ()))
            return [] if value is None else [value] if isinstance(value, str) else list(value)
        if isinstance(value, list):
            position = int(index or 0) if (index or "0").isdecimal() and len(index or "") < 10 else len(value)
            value = value[position] if position < len(value) else None
        if name in ("@", "*"):
            return self._expand_variable(name, source)
        words = self._apply_operation(value, rest, source)
        if rest and get_text(rest[0]) in (":=", "="):
            self.variables[name] = "".join(words)
        return words

    def _apply_operation(self, value: str | None, rest: "list[Node]", source: str) -> list[str]:
        if not rest:
            return [mark_unknown(source) if value is None else value]
        act = get_text(rest[0])
        if act in (":-", "-", ":=", "=", ":?", "?"):
            is_missing = value is None or (act.startswith(":") and not value)
            if not is_missing:
                return [value or ""]
            return [mark_unknown(source)] if "?" in act else ["".join(self.one(part) for part in rest[1:])]
        if act in (":+", "+"):
            return ["".join(self.one(part) for part in rest[1:]) if value else ""]
        if value is None or not is_known(value):
            return [mark_unknown(source)]
        pattern = "".join(self.one(part) for part in rest[1:2])
        if act in ("#", "##", "%", "%%"):
            self.spend(len(value))
            stripped = _strip_pattern(value, pattern, act)
            return [mark_unknown(source) if stripped is None else stripped]
        if act in ("/", "//"):
            new = "".join(self.one(part) for part in rest[3:4]) if len(rest) > 2 else ""
            num_matches = min(value.count(pattern), 1 if act == "/" else MAX_WORD) if pattern else 0
            if len(value) + num_matches * len(new) > MAX_WORD:
                return [mark_unknown(source)]
            return [value.replace(pattern, new, num_matches) if num_matches else value]
        if act in (",,", "^^"):
            return [value.lower() if act == ",," else value.upper()]
        return [mark_unknown(source)]

    def number(self, node: "Node") -> int:
        """The value of an arithmetic expression. Raises: UnknownError, ValueError, ZeroDivisionError."""
        kind, children = node.type, node.named_children
        if kind == "binary_expression" and len(node.children) == 3:
            left, sign, right = node.children
            act = _OPERATORS.get(get_text(sign))
            if act is None:
                raise UnknownError
            return _check_bounds(act(self.number(left), self.number(right)))
        if kind == "parenthesized_expression" and len(children) == 1:
            return self.number(children[0])
        if kind == "unary_expression" and len(children) == 1:
            value = self.number(children[0])
            return {"-": -value, "+": value, "!": int(not value)}.get(get_text(node.children[0]), value)
        if kind == "ternary_expression" and len(children) == 3:
            return self.number(children[1 if self.number(children[0]) else 2])
        word = get_text(node).strip()
        if kind in ("variable_name", "word") and not word.lstrip("-").isdigit():
            variable = self.variables.get(word)
            word = variable if isinstance(variable, str) else mark_unknown(word)
        elif kind not in ("number", "word"):
            word = self.one(node)
        if not is_known(word):
            raise UnknownError
        return _check_bounds(int(word.strip() or "0", 0))


def _check_bounds(value: int) -> int:
    if abs(value) >= MAX_NUMBER:
        raise ValueError
    return int(value)


def _join(parts: list[list[str]]) -> list[str]:
    """Adjacent word lists as one: the last word of each and the first of the next join."""
    words: list[str] = []
    for part in parts:
        if part and words:
            words[-1] = _shorten(words[-1] + part[0])
            words += part[1:]
        else:
            words += part
    return words


def _shorten(word: str) -> str:
    """The word; a longer one than a word may be is unknown."""
    return word if len(word) <= MAX_WORD else mark_unknown("a very long word")


def _unescape(text: str, quoted: bool = False) -> str:
    if "\\" not in text:
        return text
    characters, at = [], 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text):
            following = text[at + 1]
            if following == "\n":
                pass
            elif quoted and following not in '"$`\\':
                characters.append("\\" + following)
            else:
                characters.append(following)
            at += 2
        else:
            characters.append(text[at])
            at += 1
    return "".join(characters)


def match_pattern(text: str, pattern: str, times: int = 1) -> bool | None:
    """Whether a pattern matches a text; None for texts so long that to try it so many times would take seconds.

    >>> match_pattern("run.sh", "*.sh"), match_pattern("a" * 60_000, "*a" * 400)
    (True, None)
    """
    if not any(sign in pattern for sign in "*?["):
        return text == pattern
    if len(pattern) > MAX_PATTERN or times * len(text) * (1 + pattern.count("*")) > MAX_MATCHING:
        return None
    return fnmatch.fnmatchcase(text, pattern)


def _strip_pattern(value: str, pattern: str, act: str) -> str | None:
    """`value` without the shortest or longest beginning (`#`, `##`) or end (`%`, `%%`) that a pattern matches.

    None for a text or a pattern that is too long to be compared.
    """
    if match_pattern(value, pattern, len(value)) is None:
        return None
    cuts = range(len(value) + 1)
    ends = cuts if act in ("#", "%%") else reversed(cuts)
    for cut in ends:
        part, rest = (value[:cut], value[cut:]) if act.startswith("#") else (value[cut:], value[:cut])
        if match_pattern(part, pattern):
            return rest
    return value


def evaluate_path_command(argv: list[str], variables: Mapping[str, Value], piped: str | None = None) -> str | None:
    """The output of a command that only splits or edits a path, or of `echo`; None for any other.

    piped: output of the command before it. A pattern of `sed` is read if it is plain text.

    >>> evaluate_path_command(["basename", "/a/b.sh", ".sh"], {}), evaluate_path_command(["date"], {})
    ('b', None)
    >>> evaluate_path_command(["sed", "s#a/b#c#"], {}, "/a/b/d.sh"), evaluate_path_command(["sed", "s/.*/x/"], {}, "a")
    ('/c/d.sh', None)
    """
    words = [word for word in argv[1:] if not word.startswith("-")]
    if not argv or not all(map(is_known, words)):
        return None
    if argv[0] == "dirname" and len(words) == 1:
        return str(PurePosixPath(words[0]).parent)
    if argv[0] == "basename" and len(words) in (1, 2):
        return PurePosixPath(words[0]).name.removesuffix("".join(words[1:]))
    if argv[0] == "sed" and piped is not None and len(argv) == 2 and (edit := _SUBSTITUTION.fullmatch(words[0])):
        return _shorten(piped.replace(edit[2], edit[3], -1 if edit[4] else 1))
    if argv[0] in ("realpath", "readlink", "cd") and len(words) == 1:
        return words[0]
    if argv[0] == "echo":
        return " ".join(words)
    folder = variables.get("PWD")
    return folder if argv[0] == "pwd" and isinstance(folder, str) else None
