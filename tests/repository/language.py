"""The rules of plain English that a machine can check, in our sources and pages.

In: a Python file as a tree, or the text of a Markdown page. Out: one line per violation, with its place. Left out:
whether a sentence is clear, which only a reader can say. `python -m tests.repository.language PREFIX ...` prints the
violations in the files whose path begins with a prefix.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.documentation import ROOT, read
from tests.repository.sources import sources

VAGUE_LOCALS = frozenset(["one", "found", "said", "held", "mine", "given", "made", "told"])
SUBJECTLESS = frozenset(
    [
        "That",
        "What",
        "Whose",
        "Which",
        "Of",
        "As",
        "At",
        "By",
        "Beside",
        "Beyond",
        "Behind",
        "Below",
        "Above",
        "For",
        "From",
        "In",
        "Into",
        "On",
        "To",
        "With",
        "Within",
        "Without",
    ]
)
"""First words of a field's doc after which no subject follows."""
PREPOSITIONS = frozenset(
    ["as", "at", "behind", "beside", "by", "for", "from", "in", "of", "on", "over", "than", "to", "under", "with"]
)
NOT_A_VERB = frozenset(
    [
        "above",
        "all",
        "at",
        "behind",
        "below",
        "beside",
        "by",
        "each",
        "every",
        "for",
        "from",
        "how",
        "in",
        "its",
        "no",
        "of",
        "on",
        "that",
        "the",
        "what",
        "when",
        "where",
        "which",
        "with",
        "without",
    ]
)
"""First words of a function's name that are no verb."""
VERBS_IN_D = frozenset(
    [
        "add",
        "bind",
        "build",
        "decode",
        "download",
        "embed",
        "encode",
        "expand",
        "extend",
        "feed",
        "find",
        "fold",
        "hold",
        "listen",
        "load",
        "need",
        "open",
        "own",
        "read",
        "seed",
        "shorten",
        "widen",
    ]
)

MAX_WORDS = 25
BANNED = re.compile(
    r"\b(dealt out|come upon|coming upon|from which on|beyond which|behind (?:it|which|its)|is told|are told|given back"
    r"|in turns|teach nothing|crews?|parked|to be had|as it is typed|nearly alone)\b"
)
"""Private metaphors and inverted phrases that `CONTRIBUTING.md` names with their replacements."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_no_action(function: Function) -> bool:
    """Whether a function's name is neither a verb nor a noun, such as "bytes_of", "of_model" or "refused"."""
    if function.name.startswith(("__", "test_")) or any(
        "property" in ast.unparse(each) for each in function.decorator_list
    ):
        return False
    words = function.name.strip("_").split("_")
    is_participle = words[0] not in VERBS_IN_D and bool(re.search(r"(ed|en|own|ld)$", words[0])) and len(words) == 1
    return words[-1] in PREPOSITIONS or words[0] in NOT_A_VERB or is_participle


def find_vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Locals, parameters and functions whose names do not say what they hold or do.

    Fields of classes are left out: they may be keys of a file.
    """
    fields = {
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign | ast.Assign)
        for target in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_LOCALS:
            if id(node) not in fields:
                yield node.lineno, f"local `{node.id}`"
        elif isinstance(node, ast.arg) and node.arg in VAGUE_LOCALS:
            yield node.lineno, f"parameter `{node.arg}`"
        elif isinstance(node, Function) and names_no_action(node):
            yield node.lineno, f"function `{node.name}`"


def find_subjectless_docs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings and field docs whose first word leaves no room for a subject."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words = node.value.value.split()
            if words and words[0].rstrip(",") in SUBJECTLESS:
                yield node.lineno, f"doc begins with `{words[0]}`: {' '.join(words[:8])}"


def find_banned_words(text: str) -> Iterator[tuple[int, str]]:
    """Phrases that have a plain replacement."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in BANNED.finditer(line):
            yield number, f"`{match.group()}`: {line.strip()[:80]}"


def find_long_sentences(page: str) -> Iterator[tuple[int, str]]:
    """Sentences of a Markdown page with more than 25 words; code, tables and headings are not sentences."""
    text = re.sub(
        r"^(```|~~~).*?^\1", lambda match: "\n" * match.group().count("\n"), page, flags=re.DOTALL | re.MULTILINE
    )
    line = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)))", text):
        if not paragraph.lstrip().startswith(("|", "#", "<", "[")):
            plain = re.sub(r"\]\([^)]*\)|`[^`]*`", " code ", paragraph)
            plain = re.sub(r"(?:\bcode\b[\s,]*){2,}", "code ", plain)  # a list of names is read as one word
            for sentence in re.split(r"(?<=[.!?:;])\s+", plain):
                words = [word for word in sentence.split() if re.search(r"\w", word)]
                if len(words) > MAX_WORDS:
                    yield line, f"{len(words)} words: {' '.join(words[:10])} …"
        line += paragraph.count("\n")


def check_source(path: Path) -> list[str]:
    """Violations in one Python file."""
    tree = sources()[path]
    text = "" if path == Path(__file__).resolve() else read(path)  # this file lists the banned phrases
    rules = (find_vague_names(tree), find_subjectless_docs(tree), find_banned_words(text))
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for rule in rules for line, what in rule]


def check_page(path: Path) -> list[str]:
    """Violations on one Markdown page."""
    text = read(path)
    rules = (find_long_sentences(text), find_banned_words(text))
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for rule in rules for line, what in rule]


def main(prefixes: list[str]) -> None:
    """Print the violations in files whose path begins with one of `prefixes`, and their number."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    violations = [line for path in sources() for line in check_source(path)]
    violations += [line for path in pages for line in check_page(path)]
    chosen = [line for line in violations if not prefixes or line.startswith(tuple(prefixes))]
    print("\n".join(chosen))
    print(len(chosen), "violations")


if __name__ == "__main__":
    main(sys.argv[1:])
