"""The commands of a shell script with their words expanded, read with tree-sitter's grammar of bash and never run.

In: a script and variables from outside. Out: its commands with their lines, and notes on undecided parts.
Left out: expansion of words (words.py), tests (conditions.py); whatever is known only at run time: `$(...)` other than
paths, `while` loops, tests of files.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplan.errors import HostError, SpecError
from rlplan.foreign.shell.conditions import evaluate_test, is_test
from rlplan.foreign.shell.words import Value, Words, evaluate_path_command, get_text, match_pattern
from rlplan.foreign.unknown import is_known, strip_marks
from rlplan.reading import check_code, is_file, read_text

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STATEMENTS = 5_000
"""Statements of a script and the files that it sources, with loops unrolled."""
MAX_DEPTH = 64
"""Nesting of sourced files, calls and statements."""
PARSING = 8
"""Time of parsing a character again, relative to that of expanding it."""
MAX_REDIRECTIONS = 2_000
"""Redirections of a file: tree-sitter-bash needs time quadratic in their number, and in that of NUL characters.

Measured with 16,000: 1 s and 2 s.
"""
_BLOCKS = {"program", "compound_statement", "do_group", "subshell", "pipeline", "declaration_command"} | {
    "variable_assignments"
}
"""Nodes of the grammar whose children are statements."""
_PROCESSES = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES")
LAUNCHED_WITH = (*_PROCESSES, "USE_MCA", "USE_MEGATRON_BRIDGE", "USE_V1", "MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM")
"""Variables by which stacks choose their processes, their trainer and the size of images."""
_EXPR = re.compile(r"\$\(\s*expr\s+([\w\s$%*/+(){}-]+)\)")
"""`$(expr 16 / $N)`, which is arithmetic."""
_SETS = ("variable_assignment", "variable_assignments", "declaration_command", "compound_statement")
"""Nodes that set variables."""
_ON_GPUS = re.compile(r'device\w*}?"? *==? *"?(cuda|gpu)\b', re.IGNORECASE)
"""A test that a run's device is a GPU, which it is on every machine that is planned for."""
_FIRST_NODE = re.compile(r'NODE_RANK}?"? *(-eq|==?) *"?0')
RUN_BY = {"sbatch": "COMMAND"}
"""Variables whose text a batch script runs, by the command that submits it: NeMo-RL's `ray.sub`."""
STARTERS = ("bash", "sh", "exec", "time", "nohup")
"""Words before the name of a script that is started."""


@dataclass(frozen=True)
class Command:
    """One command of a script."""

    words: tuple[str, ...]
    """The command and its arguments."""
    places: tuple[str, ...]
    """File and line of each word."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Values of those of LAUNCHED_WITH that are set before it."""


@dataclass
class Script:
    """The commands of a script."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Parts that were left out because they are known only at run time."""
    names: set[str] = field(default_factory=set)
    """Words of the script that may be variables."""


def read_script(path: Path, variables: Mapping[str, str]) -> Script:
    """The commands of a script, in order. Raises: SpecError, HostError where the grammar is not installed."""
    reader = _Reader(_load_parser(), dict(variables))
    reader.source(path, 0)
    return reader.script


def _check_text(path: Path, text: str) -> str:
    """The text. Raises: SpecError for a text on which the grammar needs quadratic time."""
    check_code(path, text)
    num_redirections = text.count("<") + text.count(">")
    if "\0" in text or num_redirections > MAX_REDIRECTIONS:
        raise SpecError(
            "the script holds a NUL character" if "\0" in text else f"the script has {num_redirections:,} redirections",
            where=str(path),
            rule=f"a text with at most {MAX_REDIRECTIONS:,} of `<` and `>`",
            way_out="write the command that starts the training into a file of its own",
        )
    return text


def _load_parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise HostError(
            f"package '{(error.name or 'tree_sitter').replace('_', '-')}' is missing",
            where="this Python environment",
            rule="shell scripts are read with a grammar of bash, the extra 'import'",
            way_out="pip install tree-sitter tree-sitter-bash",
        ) from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


class _Reader:
    """One pass through a script, statement by statement."""

    def __init__(self, parser: Any, variables: dict[str, str]) -> None:
        self.parser, self.script = parser, Script()
        self.outside = frozenset(variables)
        self.words = Words({**variables}, self._substitute)
        self.functions: dict[str, Node] = {}
        self.path, self.num_statements = Path(), 0
        self.first_line = 1
        """First line of the current text in its file; the text of `bash -c` begins further down."""

    def source(self, path: Path, depth: int) -> None:
        """Read a file in place, as `source` does."""
        text = _check_text(path, read_text(path, "the script"))
        data = text.encode()
        self.words.file = str(path)
        if depth:
            self.words.spend(1, PARSING * len(text))
        self.script.names.update(re.findall(r"\w+", text))
        # the caller's path and BASH_SOURCE hold again after the file
        before, own = (self.path, self.first_line), self.words.variables.get("BASH_SOURCE")
        self.path, self.first_line = path, 1
        self.words.variables.update({"BASH_SOURCE": str(path.resolve()), "PWD": str(path.resolve().parent)})
        self.words.variables.setdefault("0", str(path.resolve()))
        tree = self.parser.parse(data)
        if tree.root_node.has_error:
            self._add_note(tree.root_node, "parts of this file are not bash and were skipped")
        self.run(tree.root_node, depth)
        self.path, self.first_line = before
        if own is not None:
            self.words.variables["BASH_SOURCE"] = own

    def run(self, node: "Node", depth: int) -> None:
        """Follow one statement and the statements inside."""
        self._count_statement(node, depth)
        match node.type:
            case "variable_assignment":
                self._assign(node)
            case "command":
                self._run_command(node, depth)
            case "redirected_statement":
                self._redirect(node, depth)
            case "if_statement":
                self._run_branch(node, depth)
            case "list":
                self._run_list(node, depth)
            case "case_statement":
                self._run_case(node, depth)
            case "for_statement":
                self._run_loop(node, depth)
            case "while_statement" | "c_style_for_statement":
                self._add_note(node, "a loop whose end is known only at run time was skipped")
            case "function_definition":
                self.functions[get_text(node.named_children[0])] = node.named_children[-1]
            case kind if kind in _BLOCKS:
                for child in node.named_children:
                    self.run(child, depth + 1)

    def _count_statement(self, node: "Node", depth: int) -> None:
        """Raises: SpecError for too many statements, or too deep a nesting."""
        self.num_statements += 1
        if self.num_statements > MAX_STATEMENTS or depth > MAX_DEPTH:
            raise SpecError(
                f"the script has more than {MAX_STATEMENTS:,} statements, or calls itself",
                where=self._find_place(node),
                rule=f"at most {MAX_STATEMENTS:,} with loops unrolled, at most {MAX_DEPTH} deep",
                way_out="write the command that starts the training into a file of its own",
            )

    def _assign(self, node: "Node") -> None:
        name, value = node.named_children[0], node.named_children[1] if len(node.named_children) > 1 else None
        key = get_text(name)
        if key in self.outside:
            return  # the value from outside wins; in bash a script allows that with ${X:-default}
        expanded: Value = ""
        if value is not None and value.type == "array":
            expanded = [word for child in value.named_children for word in self.words.fields(child)]
        elif value is not None:
            expanded = self.words.one(value)
        before = self.words.variables.get(key)
        if any(child.type == "+=" for child in node.children) and before is not None:
            if isinstance(before, list):
                expanded = before + (expanded if isinstance(expanded, list) else [expanded])
            else:
                expanded = before + (expanded if isinstance(expanded, str) else " ".join(expanded))
        self.words.variables[key] = expanded

    def _run_command(self, node: "Node", depth: int) -> None:
        words, places = self._expand_command(node)
        if not words:
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._assign(child)
            return
        started = next((at for at in find_scripts(words) if is_file(self._resolve(words[at]))), None)
        if words[0] in self.functions:
            self._run_with_arguments(words[1:], lambda: self.run(self.functions[words[0]], depth + 1))
        elif started is not None:
            self._run_with_arguments(
                words[started + 1 :], lambda: self.source(self._resolve(words[started]), depth + 1)
            )
        elif words[0] in ("source", ".") and len(words) > 1:
            self._source_file(node, words[1], depth)
        elif (at := find_text(words)) is not None:
            self._run_text(words[at], places[at], depth)
        else:
            self.script.commands.append(Command(tuple(words), tuple(places), self._find_environment(node)))
            if text := self._find_batch_text(node, words[0]):
                self._run_text(text, places[0], depth)

    def _run_text(self, text: str, place: str, depth: int) -> None:
        """Read the commands of a text as if they stood at a place."""
        self.words.spend(1, PARSING * len(text))
        before, self.first_line = self.first_line, int(place.rpartition(":")[2])
        self.run(self.parser.parse(_check_text(self.path, text).encode()).root_node, depth + 1)
        self.first_line = before

    def _find_batch_text(self, node: "Node", word: str) -> str:
        """The text of the variable that a batch script runs, set before the command or in the script; else empty."""
        return self._find_variable(node, RUN_BY.get(word.rpartition("/")[2], ""))

    def _find_environment(self, node: "Node") -> dict[str, str]:
        return {name: value for name in LAUNCHED_WITH if (value := self._find_variable(node, name))}

    def _find_variable(self, node: "Node", name: str) -> str:
        """A variable's value for a command, set before it or in the script; else empty."""
        text = self.words.variables.get(name, "")
        for child in node.named_children:
            if child.type == "variable_assignment" and get_text(child.named_children[0]) == name:
                text = self.words.one(child.named_children[-1])
        return text if isinstance(text, str) else ""

    def _run_with_arguments(self, arguments: list[str], act: Callable[[], None]) -> None:
        """Run an action with arguments `$1`, `$2` and `$@`, and restore the previous ones afterwards."""
        self.words.spend(len(arguments) + len(self.words.variables) // 8)
        outer = {key: value for key, value in self.words.variables.items() if key == "@" or key.isdigit()}
        self.words.variables["@"] = arguments
        self.words.variables.update({str(index): word for index, word in enumerate(arguments, 1)})
        act()
        for key in [key for key in self.words.variables if key == "@" or key.isdigit()]:
            del self.words.variables[key]
        self.words.variables.update(outer)

    def _resolve(self, word: str) -> Path:
        return self.path.resolve().parent / word

    def _redirect(self, node: "Node", depth: int) -> None:
        """A statement with redirections; `read NAME <<EOF` is an assignment."""
        body, *rest = node.named_children
        argv = self._expand_command(body)[0] if body.type == "command" else []
        text = self._here_document(node)
        if argv[:1] == ["read"] and text is not None:
            self.words.variables[argv[-1]] = text.strip("\n")
            return
        for child in (body, *rest):
            self.run(child, depth + 1)

    def _here_document(self, node: "Node") -> str | None:
        """The text of a here-document, expanded as in double quotes unless its first `EOF` is quoted."""
        redirect = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
        parts = {child.type: child for child in redirect.named_children} if redirect is not None else {}
        if "heredoc_body" not in parts:
            return None
        text = get_text(parts["heredoc_body"])
        self.words.spend(1, PARSING * len(text))
        if get_text(parts["heredoc_start"])[:1] in ("'", '"', "\\"):
            return text
        quoted = text.replace('"', '\\"')
        parsed = self.parser.parse(f': "{quoted}"'.encode()).root_node.named_children[0].named_children[-1]
        return self.words.one(parsed)

    def _expand_command(self, node: "Node") -> tuple[list[str], list[str]]:
        """The words of a command, and the place of each."""
        parts = [child for child in node.named_children if child.type != "variable_assignment"]
        words: list[str] = []
        places: list[str] = []
        for part in parts:
            if part.type == "command_name":
                part = part.named_children[0] if part.named_children else part
            if not part.type.endswith("redirect"):
                words += self.words.fields(part)
                places += [self._find_place(part)] * (len(words) - len(places))
        return words, places

    def _source_file(self, node: "Node", word: str, depth: int) -> None:
        if is_known(word) and is_file(self._resolve(word)):
            self.source(self._resolve(word), depth + 1)
        else:
            self._add_note(node, f"'{strip_marks(word)}' was not found beside the script and not read")

    def _run_list(self, node: "Node", depth: int) -> None:
        """`A && B`: B unless A is known to fail. `A || B`: B only where A is known to."""
        left, right = node.named_children[0], node.named_children[-1]
        verdict = evaluate_test(left, self.words)
        is_and = any(child.type == "&&" for child in node.children)
        if verdict is None and not is_test(left):
            self.run(left, depth + 1)
        elif verdict is None and right.type in _SETS:
            self._add_note(left, f"taken as true, because it is known only at run time: {get_text(left)[:80]}")
        if (is_and and verdict is not False) or (not is_and and verdict is False):
            self.run(right, depth + 1)

    def _run_branch(self, node: "Node", depth: int) -> None:
        """Follow the branch that is taken; a test that is known only at run time counts as false."""
        body, is_open = [], True
        test = node.named_children[0]
        verdict = self._decide_test(test)
        for child in node.named_children[1:]:
            if child.type in ("elif_clause", "else_clause"):
                if verdict or not is_open:
                    break
                body = list(child.named_children)
                verdict = True
                if child.type == "elif_clause":
                    verdict = self._decide_test(body.pop(0))
                if verdict:
                    break
                body = []
            elif verdict:
                body.append(child)
        for child in body:
            self.run(child, depth + 1)

    def _decide_test(self, test: "Node") -> bool:
        verdict = evaluate_test(test, self.words)
        if verdict is None:
            is_first, on_gpus = (kind.search(get_text(test)) is not None for kind in (_FIRST_NODE, _ON_GPUS))
            verdict = is_first or on_gpus
            taken = "true, as on the first node" if is_first else "true, as on a GPU" if on_gpus else "false"
            self._add_note(test, f"taken as {taken}, because it is known only at run time: {get_text(test)[:80]}")
        return bool(verdict)

    def _run_case(self, node: "Node", depth: int) -> None:
        subject = self.words.one(node.named_children[0])
        for item in node.named_children[1:]:
            closing = next((child.start_byte for child in item.children if child.type == ")"), 0)
            patterns = [child for child in item.named_children if child.end_byte <= closing]
            if any(match_pattern(subject, self.words.one(pattern)) for pattern in patterns):
                for child in item.named_children[len(patterns) :]:
                    self.run(child, depth + 1)
                return

    def _run_loop(self, node: "Node", depth: int) -> None:
        *head, body = node.named_children
        values = [word for child in head[1:] for word in self.words.fields(child)]
        for value in values:
            self.words.variables[get_text(head[0])] = value
            self.run(body, depth + 1)

    def _substitute(self, node: "Node") -> str | None:
        """The text of a `$(...)` that only splits a path or computes a number; None for any other."""
        words, source = None, _EXPR.sub(r"$((\1))", get_text(node).strip())
        self.words.spend(1, PARSING * len(source))
        if source.startswith("$((") and source.endswith("))"):  # within ${X:-...} the grammar parses it as commands
            parsed = self.parser.parse(f": {source}".encode()).root_node.named_children[0].named_children[-1]
            return self.words.one(parsed) if parsed.type == "arithmetic_expansion" else None
        if node.named_children and (text := self._here_document(node.named_children[0])) is not None:
            return text.rstrip("\n") if source[2:].split()[:1] == ["cat"] else None
        for command in _find_commands(node):
            argv, _ = self._expand_command(command)
            if argv and argv[0] == "pwd" and words is not None:
                continue  # cd FOLDER && pwd
            words = evaluate_path_command(argv, self.words.variables, words)
        return words

    def _add_note(self, node: "Node", text: str) -> None:
        self.script.notes.append(f"{self._find_place(node)}: {text}")

    def _find_place(self, node: "Node") -> str:
        lines = (node.text or b"").split(b"\\\n")[:-1]  # the grammar counts continued lines before a word to the word
        skipped = sum(1 for line in lines if not line.strip())
        return f"{self.path.name}:{node.start_point[0] + self.first_line + skipped}"


def _find_commands(node: "Node") -> Iterable["Node"]:
    for child in node.named_children:
        if child.type == "command":
            yield child
        elif child.type in ("list", "pipeline", "redirected_statement", "subshell"):
            yield from _find_commands(child)


def find_text(words: list[str]) -> int | None:
    """Index of the text of `bash -c TEXT`, also after srun, docker or ssh; None without one.

    >>> find_text(["srun", "-N", "1", "bash", "-lc", "echo 1"]), find_text(["bash", "run.sh"])
    (5, None)
    """
    shells = (at for at, word in enumerate(words[:-2]) if word.rpartition("/")[2] in ("bash", "sh", "zsh"))
    flags = ((at + 1, words[at + 1]) for at in shells)
    return next((at + 1 for at, flag in flags if flag.startswith("-") and flag[1:].isalpha() and "c" in flag), None)


def find_scripts(words: list[str]) -> list[int]:
    """Indices where the name of another script may stand: first, or after words such as `bash` and their flags.

    >>> [find_scripts(line.split()) for line in ("nohup bash -x inner.sh 8", "./inner.sh", "echo a.sh")]
    [[3], [0], []]
    """
    at = next((at for at, word in enumerate(words) if word not in STARTERS and not word.startswith("-")), None)
    return [] if at is None or not (at or words[0].endswith(".sh")) else [at]
