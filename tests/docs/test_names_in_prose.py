"""Prose names files, modules and functions of ours that exist: pages and docstrings of the library, tools and tests.

In: tracked Markdown pages and docstrings. Left out: docs/lab-notes.md and CHANGELOG.md, which describe the past.

A name is taken for an upstream project's where the sentence before it names that project, or where it stands after the
docstring's `Source`; a name without a dot, such as `num_takes` or `RolloutBuffer`, also where the docstring or its
module's names one. In Markdown tables sources have columns of their own, so pages are held to names and to paths from
the repository's root, docstrings to bare file names too.
"""

import ast
import builtins
import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from rlplan.spec.hardware.profile import HardwareProfile
from rlplan.spec.resolved import ResolvedJob, SettledJob
from tests.docs.documentation import ROOT, read
from tests.repository.sources import nodes, sources

FOLDERS = ("rlplan", "cli", "tests", "benchmarks", "docs", "examples", "reports", "requirements", "hardware_profiles")
HISTORY = ("docs/lab-notes.md", "CHANGELOG.md")
SECTIONS = {name for kind in (ResolvedJob, SettledJob, HardwareProfile) for name in kind.model_fields} | {"job"}
"""First words of keys, which other tests hold: `training.tp` is no function of a module `training`."""
LIBRARIES = {"ray", "torch", "vllm", "deepspeed", "transformers", "os", "math", "json"}
UPSTREAM = re.compile(
    r"\b(Source|vLLM|SGLang|DeepSpeed\w*|ZeRO's|torch\w*|PyTorch|ATen|transformers|accelerate|PEFT|TRL|verl|litgpt|Ray"
    r"|Megatron\w*|bitsandbytes|Liger|aiconfigurator|flash-linear-attention|CPython|nccl\S*|baselines|slime|NemotronH|datasets)\b"
)
OF_MODELS = re.compile(r"(modeling|configuration)_\w+\.py")
"""Files of transformers by their names alone."""
FILE = re.compile(r"(?<![\w./<-])((?:[\w-]+/)*\w+\.py)\b(?!:NAME|:function)")
PATH = re.compile(rf"(?<![\w./<:@-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)(?![\w/*{{<])")
DOTTED = re.compile(r"`((?:[\w-]+/)*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\([^`]*\))?`")
CALL = re.compile(r"`([a-z_]\w*)\([^`]*\)`")
BARE = re.compile(r"`(\w*[^\W_]_[^\W_]\w*|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+)`")
"""An identifier of more than one word."""
SUFFIX = re.compile("py|md|jsonl?|yaml|png|csv|html|lock|toml|safetensors|jinja|log|sh|pftrace")
RENAMED = ("renamed", "old_budget")
"""Modules that hold the keys of older versions."""


@cache
def paths() -> frozenset[str]:
    """Every file and folder, from the root."""
    kept = [path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return frozenset(path.relative_to(ROOT).as_posix() for path in kept if "__pycache__" not in path.parts)


@cache
def collect_names() -> dict[str, set[str]]:
    """Names in each module (by its last name), folder and class."""
    names: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in sources():
        module = path.parent.name if path.stem == "__init__" else path.stem
        names.setdefault(module, set()).update(_bound(nodes(path)))
        names.setdefault(path.parent.name, set()).add(path.stem)
        names.setdefault(path.parent.parent.name, set()).add(path.parent.name)
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, set()).update(_bound(ast.walk(node)))
                named = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
                bases.setdefault(node.name, set()).update(named)
    for name in bases:
        for base in _ancestors(name, bases):
            names[name] |= names.get(base, set())
    return names


@cache
def words() -> set[str]:
    """Every identifier of our code, and every word in the library's strings and in data: keys, settings, metrics."""
    known = set[str]()
    for path in sources():
        prose = {id(constant) for constant in find_prose(path)}
        known |= {path.stem, path.parent.name, *_bound(nodes(path))}
        counts_strings = path.relative_to(ROOT).parts[0] != "tests" and path.stem not in RENAMED
        for node in nodes(path):
            if isinstance(node, ast.Constant):
                if counts_strings and isinstance(node.value, str) and id(node) not in prose:
                    known.update(re.findall(r"\w+", node.value))
            elif isinstance(node, (ast.Name, ast.Attribute, ast.keyword)):  # a union is slow to look in
                known.add(next(getattr(node, part) for part in ("id", "attr", "arg") if hasattr(node, part)) or "")
    data = (ROOT / path for path in paths() if path.endswith((".yaml", ".toml", ".j2", "/job.json", "points.json")))
    for path in (*data, ROOT / "Makefile", ROOT / "pyproject.toml"):
        known.update(re.findall(r"\w+", read(path)))
    return known


def _ancestors(name: str, bases: dict[str, set[str]]) -> set[str]:
    """The classes that one inherits from, by name."""
    ancestors, left = set[str](), {name}
    while left:
        ancestors |= left
        left = {base for derived in left for base in bases.get(derived, ())} - ancestors
    return ancestors - {name}


def _bound(inside: Iterable[ast.AST]) -> Iterator[str]:
    for inner in inside:
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg)):
            yield inner.arg if isinstance(inner, ast.arg) else inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr
        elif isinstance(inner, ast.alias):
            yield inner.asname or inner.name


def pages() -> list[str]:
    root_pages = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")]
    return sorted({*root_pages, *(path for path in paths() if path.endswith(".md"))} - set(HISTORY))


def find_prose(path: Path) -> Iterator[ast.Constant]:
    """Docstrings of a module, its classes and functions, and those under a constant or a field."""
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def docstrings(path: Path) -> Iterator[str]:
    for constant in find_prose(path):
        yield remove_doctests(str(constant.value))


def is_upstream(text: str, start: int) -> bool:
    """Whether what stands at `start` belongs to another project by the words before it."""
    sentence = re.split(r"(?<=[.;:|])\s", text[:start])[-1]
    return "Source" in text[:start] or UPSTREAM.search(sentence) is not None


@cache
def ends() -> frozenset[str]:
    """Every path from each of its folders on."""
    return frozenset(
        "/".join(parts[at:]) for path in paths() for parts in [path.split("/")] for at in range(len(parts))
    )


@cache
def beginnings() -> frozenset[str]:
    """Every path, whole and without what follows a dot in it."""
    return paths() | {path[:at] for path in paths() for at, sign in enumerate(path) if sign == "."}


def has_path(name: str) -> bool:
    return name in ends()


def gone_files(text: str) -> Iterator[str]:
    for match in FILE.finditer(text):
        name = match.group(1)
        if not has_path(name) and not OF_MODELS.fullmatch(name) and not is_upstream(text, match.start()):
            yield name


def gone_paths(text: str) -> Iterator[str]:
    for match in PATH.finditer(text):
        name = match.group(1).rstrip(".")
        is_there = name in beginnings()
        is_pattern = name.rpartition("/")[2].isupper()  # a name in capitals stands for others
        if not is_there and not is_pattern and not is_upstream(text, match.start()):
            yield name


def gone_names(text: str) -> Iterator[str]:
    for match in DOTTED.finditer(text):
        parts = match.group(1).rpartition("/")[2].split(".")
        is_known = parts[0] in SECTIONS | LIBRARIES or SUFFIX.fullmatch(parts[-1])
        pairs = itertools.pairwise(parts)
        if not is_known and any(
            holder in collect_names() and name not in collect_names()[holder] for holder, name in pairs
        ):
            yield match.group(1)
    for match in CALL.finditer(text):
        name = match.group(1)
        known = any(name in names for names in collect_names().values()) or hasattr(builtins, name)
        if not known and not is_upstream(text, match.start()):
            yield f"{name}()"


def gone_bare_names(text: str, about: str = "") -> Iterator[str]:
    """about: what says whose names these are, such as the module's docstring."""
    for match in BARE.finditer(text):
        if match.group(1) not in words() and not UPSTREAM.search(about) and not is_upstream(text, match.start()):
            yield match.group(1)


def remove_doctests(text: str) -> str:
    return re.sub(r"(?m)^\s*(>>>|\.\.\.) .*$", "", text)


@pytest.mark.parametrize("page", pages())
def test_every_name_of_ours_on_a_page_exists(page: str) -> None:
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", read(ROOT / page))
    assert [*gone_paths(text), *gone_names(text), *gone_bare_names(text)] == []


def test_every_name_of_ours_in_a_docstring_exists() -> None:
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in sources().items()
        for text in docstrings(path)
        for bare in [gone_bare_names(text, f"{ast.get_docstring(tree)} {text}")]
        for name in (*gone_files(text), *gone_paths(text), *gone_names(text), *bare)
    ]
    assert gone == []


def test_names_that_are_gone_are_found_and_those_of_other_projects_are_not() -> None:
    assert list(gone_files("Left out: bytes (gpu_roles.py).")) == ["gpu_roles.py"]
    assert list(gone_files("Left out: bytes (gpu/roles.py), see units.py.")) == []
    assert list(gone_files("vLLM asks for its share (v1/worker/utils.py). Source: runtime/engine.py.")) == []
    assert list(gone_paths("see rlplan/runtime/gone.py and tests/test_units.py")) == ["rlplan/runtime/gone.py"]
    assert list(gone_names("`units.format_bytes`, `units.format_bites`, `training.tp`, `MemoryLedger.host_peak`")) == [
        "units.format_bites"
    ]
    assert list(gone_names("`format_bytes(3)`, `format_bites(3)`; vLLM's `profile_run()`")) == ["format_bites()"]
    assert list(gone_names("`ledger.MemoryLedger.host_peek`")) == ["ledger.MemoryLedger.host_peek"]
    assert list(gone_bare_names("`format_bytes`, `format_bites`, `MemoryLedger`, `MemoryLegder`, `zero_stage`")) == [
        "format_bites",
        "MemoryLegder",
    ]
    assert list(gone_bare_names("vLLM's `num_scheduled_requests`; then `num_gone`")) == ["num_gone"]
