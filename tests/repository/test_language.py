"""The library, the command line and the pages keep the rules of plain English that a machine can check."""

import ast

from tests.docs.documentation import ROOT
from tests.repository.language import (
    Function,
    check_page,
    check_source,
    find_long_sentences,
    find_subjectless_docs,
    find_vague_names,
    names_no_action,
)
from tests.repository.sources import nodes, sources

MAX_SHARE = 0.05
"""Names of functions that are neither verb nor noun, as a share; peers have 4 to 5 %."""


def test_locals_say_what_they_hold_and_docs_have_subjects() -> None:
    broken = [line for path in sources() for line in check_source(path) if "function `" not in line]
    assert broken == []


def test_functions_are_named_by_what_they_do() -> None:
    functions = [
        node
        for path in sources()
        if path.relative_to(ROOT).parts[0] in ("rlplan", "cli")
        for node in nodes(path)
        if isinstance(node, Function)
    ]
    vague = [node.name for node in functions if names_no_action(node)]
    assert len(vague) <= MAX_SHARE * len(functions), sorted(vague)


def test_sentences_of_pages_have_at_most_twenty_five_words() -> None:
    assert [line for page in sorted((ROOT / "docs").rglob("*.md")) for line in check_page(page)] == []


def test_the_rules_see_what_they_look_for() -> None:
    tree = ast.parse('def sum_of(given):\n    """Of a layer."""\n    found = given\n    return found\n')
    assert [what for _, what in find_vague_names(tree)] == ["function `sum_of`", "parameter `given`", "local `found`"]
    assert len(list(find_subjectless_docs(tree))) == 1
    assert len(list(find_long_sentences("word " * 26 + "."))) == 1
    assert list(find_long_sentences("| " + "word " * 30 + "|\n\n```\n" + "word " * 30 + "\n```\n")) == []
