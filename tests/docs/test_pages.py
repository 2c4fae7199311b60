"""The documentation says what the code says: links, commands, words, profiles and examples.

Left out: whether the prose is right. The larger pages have tests of their own beside this file.
"""

import re
import shlex
import typing
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest
import typer
from pydantic import TypeAdapter
from rlplan_cli.app import app, choose_command

from rlplan import vocabulary
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import get_profile
from rlplan.spec.hardware.profile import HardwareProfile, SourcedBytes
from rlplan.units import format_bytes
from tests.docs.documentation import (
    ALL_KEYS,
    DOCS,
    EXAMPLES,
    ROOT,
    anchors,
    plan_example,
    read,
    remove_code_blocks,
    rows,
    section,
    words,
)
from tests.factories import JOB_EXAMPLES

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*.md",
        "hardware_profiles/*.md",
        "reports/*.md",
        "requirements/*.md",
    )
    for path in ROOT.glob(pattern)
)


PARTS_AND_KEYS = ALL_KEYS | {key.rsplit(".", count)[0] for key in ALL_KEYS for count in range(1, key.count(".") + 1)}
"""A part may be given as a whole: as a short form (`hardware=8xH100`) or as a mapping."""

# ------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", remove_code_blocks(read(path))):
        if re.match(r"(https?|mailto):", target):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        if target.startswith("/") or not to.is_relative_to(ROOT) or not to.exists():
            broken.append(f"{target}: no such file in the repository")
        elif anchor and anchor not in anchors(read(to)):
            broken.append(f"{target}: no such heading")
    assert broken == []


# ---------------------------------------------------------------------------------------------------------- commands


def commands(text: str) -> Iterator[str]:
    """Command lines of `rlplan` in code blocks and inline code, with continuation lines joined."""
    for block in re.findall(r"(?ms)^ *```\w*\n(.*?)^ *```", text):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r" *(\$ )?rlplan ", line):
                yield line.strip().removeprefix("$ ")
    yield from re.findall(r"`(rlplan [^`\n]+)`", remove_code_blocks(re.sub(r"(?<=\S)\n(?=\S)", " ", text)))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shown_is_understood_by_the_command_line(page: str) -> None:
    root = typer.main.get_command(app)
    for line in commands(read(ROOT / page)):
        _, *arguments = [word for word in shlex.split(line, comments=True) if word not in ("--debug", "--help", "-h")]
        arguments = [*choose_command(arguments[0]), *arguments] if arguments else arguments
        command: Any = root
        while hasattr(command, "commands") and arguments:
            name = arguments.pop(0)
            assert name in command.commands, f"{line}: no command '{name}'"
            command = command.get_command(typer.Context(command), name)
        try:
            command.make_context("rlplan", list(arguments), resilient_parsing=not arguments)
        except typer.TyperException as error:
            pytest.fail(f"{line}: {error.format_message()}")
        for before, word in zip(["", *arguments], arguments, strict=False):
            key, is_override, _ = word.partition("=")
            of_others = line.startswith(("rlplan check", "rlplan import")) or before in ("--price", "--field")
            if is_override and not key.startswith("-") and not of_others:
                assert key in PARTS_AND_KEYS | {"rewards"}, f"{line}: no job has a key {key}"
            if word.startswith("examples/"):
                assert (ROOT / word).is_file(), f"{line}: {word} does not exist"


# ---------------------------------------------------------------------------------------------------------- glossary

GLOSSARY = read(DOCS / "glossary.md")
ENUMS = [
    value
    for value in vars(vocabulary).values()
    if isinstance(value, type) and issubclass(value, StrEnum) and value is not StrEnum
]


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_every_word_of_the_vocabulary_is_explained_in_a_line(enum: type[StrEnum]) -> None:
    parts = [part for part in re.split(r"(?m)^## ", GLOSSARY) if f"(`{enum.__name__}`)" in part]
    assert len(parts) == 1, f"one section of the glossary names `{enum.__name__}`"
    explained = {words(row[0])[0]: row[1] for row in rows(parts[0])}
    assert list(explained) == [word.value for word in enum]
    assert all(explained.values())


def test_the_persistent_kinds_are_named() -> None:
    sentence = re.search(r"The kinds ([^.]*?) are \*persistent\*", GLOSSARY)
    assert sentence
    assert words(sentence.group(1)) == [kind.value for kind in vocabulary.PERSISTENT_KINDS]


# --------------------------------------------------------------------------------------------- profiles and examples

PROFILES_PAGE, EXAMPLES_PAGE = read(ROOT / "hardware_profiles" / "README.md"), read(EXAMPLES / "README.md")


def profile_values(value: Spec, prefix: str = "") -> Iterator[tuple[str, SourcedBytes]]:
    for name in type(value).model_fields:
        inner = getattr(value, name)
        if isinstance(inner, SourcedBytes):
            yield prefix + name, inner
        elif isinstance(inner, Spec):
            yield from profile_values(inner, f"{prefix}{name}.")


def profile_keys(kind: type[Spec], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Spec) and inner is not SourcedBytes:
            yield from profile_keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_of_a_cpu_host_is_documented() -> None:
    keys = {words(row[0])[0] for row in rows(section(PROFILES_PAGE, "What a CPU host says")) if len(row) == 3}
    assert keys == set(profile_keys(HardwareProfile))


def test_the_values_of_the_cpu_profile_are_those_of_its_file() -> None:
    table = {
        words(row[0])[0]: words(row[1]) + words(row[2])
        for row in rows(section(PROFILES_PAGE, "The values of cpu-host"))
    }
    values = dict(profile_values(get_profile("cpu-host", where="docs")))
    parse: TypeAdapter[Any] = TypeAdapter(typing.Annotated[int, *SourcedBytes.model_fields["value"].metadata])
    documented = {key: (parse.validate_python(size), provenance) for key, (size, provenance) in table.items()}
    assert documented == {key: (value.value, value.provenance.value) for key, value in values.items()}


def test_every_example_is_listed_with_its_steps_and_memory() -> None:
    listed = {
        words(row[0])[0] if words(row[0]) else re.findall(r"\[(.+?)\]", row[0])[0]: row for row in rows(EXAMPLES_PAGE)
    }
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if path not in JOB_EXAMPLES:
            continue  # on GPUs: docs/planning.md names it
        plan = plan_example(path.stem)
        row, ledger = listed[path.name], plan.ledger
        assert row[2] == str(plan.job.workload.num_steps)
        assert row[4] == f"{format_bytes(ledger.host_peak().num_bytes)} of {format_bytes(ledger.host_capacity)}"
