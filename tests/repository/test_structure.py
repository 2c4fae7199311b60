"""The house keeps its sizes, and whatever names a module of ours names one that exists.

In: tracked Python files, and texts that name modules. Left out: docs/lab-notes.md and CHANGELOG.md, which describe
the past; names without their package, which tests/docs/test_names_in_prose.py holds.
"""

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import typer
from rlplan_cli.app import app

from tests.docs.documentation import ROOT, read
from tests.repository.sources import FOLDERS, nodes, sources

HISTORY = {ROOT / "docs" / "lab-notes.md", ROOT / "CHANGELOG.md"}
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 20, 600, 80, 10
MAX_OPTIONS = 12
"""Options of a command, arguments included."""
OURS = ("rlplan", "rlplan_cli", "tests", "benchmarks")
DOTTED = re.compile(rf"(?<![\w./@-])(?:{'|'.join(OURS)})(?:\.[A-Za-z_]\w*)+(?![\w/{{-])")
PATH = re.compile(r"(?<![\w./@-])(?:\.\./)*((?:rlplan|cli/rlplan_cli|tests|benchmarks)/[\w/.-]*\.py)\b")
ROOTS = {top: ROOT / "cli" if top == "rlplan_cli" else ROOT for top in OURS}
COMMAND = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["scripts"]["rlplan"]


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
        for path in sources()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_a_folder_has_at_most_twenty_modules() -> None:
    num_modules = Counter(path.parent for path in sources() if path.name not in ("__init__.py", "conftest.py"))
    assert {
        str(folder.relative_to(ROOT)): number for folder, number in num_modules.items() if number > MAX_MODULES
    } == {}


def test_a_package_says_what_it_is_for() -> None:
    packages = [
        path for path in sources() if path.name == "__init__.py" and path.relative_to(ROOT).parts[0] in FOLDERS[:2]
    ]
    assert [str(path.relative_to(ROOT)) for path in packages if not ast.get_docstring(sources()[path])] == []


def test_every_room_is_on_the_page_about_the_architecture() -> None:
    page = read(ROOT / "docs" / "architecture.md")
    rooms = {path.parent.relative_to(ROOT) for path in sources() if path.relative_to(ROOT).parts[0] in FOLDERS[:2]}
    assert [str(room) for room in sorted(rooms) if len(room.parts) > 1 and f"{room.name}/" not in page] == []


def test_a_file_has_at_most_six_hundred_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(read(path).splitlines()) for path in sources()}
    assert {path: number for path, number in lines.items() if number > MAX_LINES} == {}


def test_a_function_has_at_most_eighty_lines() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name: number for name, number in lines.items() if number > MAX_FUNCTION_LINES} == {}


def test_a_function_has_at_most_ten_parameters() -> None:
    too_many = {}
    for name, node in functions():
        listed = node.args.posonlyargs + node.args.args
        of_itself = bool(listed) and listed[0].arg in ("self", "cls")
        variadic = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
        number = len(listed) + len(node.args.kwonlyargs) + len(variadic) - of_itself
        if number > MAX_PARAMETERS:
            too_many[name] = number
    assert too_many == {}


def test_a_command_has_at_most_twelve_options() -> None:
    root: Any = typer.main.get_command(app)
    verbs = {verb: root.get_command(None, verb) for verb in root.commands}
    commands = {f"{verb} {name}": command for verb, whole in verbs.items() for name, command in leaves(whole)}
    assert "profiles list" in commands
    assert {name: len(command.params) for name, command in commands.items() if len(command.params) > MAX_OPTIONS} == {}


def leaves(command: Any) -> list[tuple[str, Any]]:
    """A command by no name, or the commands of a group by theirs."""
    return [*getattr(command, "commands", {"": command}).items()]


def texts() -> dict[Path, str]:
    """Texts that may name a module: sources, pages, settings, examples."""
    kept = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile", *sources()]
    for folder in (*FOLDERS, "docs", "reports", "hardware_profiles", "requirements"):
        kept += [path for kind in ("md", "yaml", "txt") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return {path: read(path) for path in kept if path not in HISTORY}


@cache
def find_names(module: Path) -> set[str]:
    """Names that a module binds at its top level, imports included."""
    names = set()
    for node in ast.walk(ast.parse(read(module))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def exists(name: str) -> bool:
    """Whether a dotted name is one of our packages or modules, or something in one."""
    top, *rest = name.split(".")
    place = ROOTS[top] / top
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if not rest:
        return True
    module = place / f"{rest[0]}.py"
    if module.is_file():
        return len(rest) == 1 or rest[1] in find_names(module) or rest[1].startswith("__")
    package = place / "__init__.py"
    return package.is_file() and (rest[0] in find_names(package) or rest[0].startswith("__"))


def test_every_module_that_is_named_in_full_exists() -> None:
    gone = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path, text in texts().items()
        for match in DOTTED.finditer(text)
        if not exists(match.group())
    ]
    assert gone == []


def test_every_file_of_ours_that_is_named_by_its_path_exists() -> None:
    gone = [
        f"{path.relative_to(ROOT)}: {match.group(1)}"
        for path, text in texts().items()
        if path.suffix != ".py"  # of docstrings tests/docs/test_names_in_prose.py takes care
        for match in PATH.finditer(text)
        if not (ROOT / match.group(1)).is_file() and not re.search(r"github\.com/\S*$", text[: match.start()][-200:])
    ]
    assert gone == []


def test_the_installed_command_is_there() -> None:
    module, _, function = COMMAND.partition(":")
    assert exists(f"{module}.{function}")
