"""What table.py cannot say: names put together while a program runs, and the pages that list the rooms."""

import re
import sys
from pathlib import Path

import cuts

COPIED = {
    "test_structure.py": "tests/repository/test_structure.py",
    "architecture.md": "docs/architecture.md",
}

MODULE_NAMED = '''@cache
def module_named(name: str) -> ModuleType:
    """The module of rlplan.memory that pages call by the end of its path: `zero`, `serving.kv`, `gpu.states`."""
    found = list((ROOT / "rlplan" / "memory").rglob(f"{name.replace('.', '/')}.py"))
    assert len(found) == 1, (name, found)
    return importlib.import_module(".".join(found[0].relative_to(ROOT).with_suffix("").parts))


'''


def before(root: Path) -> None:
    """Cuts that make room, on the old paths."""
    cuts.all_cuts(root)
    sweep = root / "benchmarks/staleness_sweep.py"
    if sweep.exists():
        text = sweep.read_text()
        sweep.write_text(text.replace("assumed input is another, calibrated anew", "assumed input is another, recalibrated"))


def after(root: Path) -> None:
    replace(
        root / "rlplan/runtime/weight_sync/transports/registry.py",
        ('f"rlplan.runtime.weight_sync.{module}"', 'f"rlplan.runtime.weight_sync.transports.{module}"'),
    )
    replace(root / "cli/rlplan_cli/app.py", ('f"rlplan_cli.{name}"', 'f"rlplan_cli.commands.{name}"'))
    replace(
        root / "README.md",
        ("- [docs/job.md](docs/job.md)", "- [docs/architecture.md](docs/architecture.md): the rooms of the code, and a job's way through them\n- [docs/job.md](docs/job.md)"),
    )
    replace(
        root / "CONTRIBUTING.md",
        (
            "Aim at files of 300 lines, functions of 40, at most 6 parameters, at most 10 modules in a package.",
            "Aim at files of 300 lines, functions of 40, at most 6 parameters; a test refuses more than 400, 60, 8, and more than 12\n"
            "modules in a folder ([docs/architecture.md](docs/architecture.md) is the tree).",
        ),
    )
    predictors(root / "rlplan/accuracy/compare.py")
    memory_page(root)


def replace(path: Path, *pairs: tuple[str, str]) -> None:
    """Fails where a text is not there and its replacement neither."""
    if not path.exists():
        print(f"patches.py: no {path}")
        return
    text = path.read_text()
    for old, new in pairs:
        if old not in text and new not in text:
            sys.exit(f"{path}: neither {old!r} nor what replaces it")
        is_done = new in text and (old in new or old not in text)
        text = text if is_done else text.replace(old, new)
    path.write_text(text)


def predictors(path: Path) -> None:
    """The modules that register predictors, by their names within rlplan.accuracy."""
    from table import ROWS

    def one(match: re.Match[str]) -> str:
        new = ROWS.get(f"rlplan/accuracy/{match.group(1)}.py")
        return f'"{new.removeprefix("rlplan/accuracy/").removesuffix(".py").replace("/", ".")}"' if new else match.group(0)

    in_block(path, "PREDICTORS", one)


def in_block(path: Path, name: str, one) -> None:  # type: ignore[no-untyped-def]
    """Every quoted word of `NAME = (...)` rewritten."""
    text = path.read_text()
    found = re.search(rf"(?ms)^{name} = \(\n.*?^\)\n", text)
    if found is None:
        sys.exit(f"{path}: no {name}")
    path.write_text(text.replace(found.group(0), re.sub(r'"([\w.]+)"', one, found.group(0))))


def memory_page(root: Path) -> None:
    """The tests of the formulas on pages find a module by the end of its path."""
    from table import ROWS

    def one(match: re.Match[str]) -> str:
        old = f"rlplan/memory/{match.group(1).replace('.', '/')}.py"
        new = ROWS.get(old, old)
        room, base = new.removesuffix(".py").split("/")[-2:]
        name = base if base == match.group(1) or room == "memory" else f"{room}.{base}"
        return f'"{name}"'

    page = root / "tests/docs/test_memory_model.py"
    if page.exists():
        in_block(page, "FORMULA_MODULES", one)
        replace(
            page,
            ('importlib.import_module(f"rlplan.memory.{module_name}")', "module_named(module_name)"),
            ('importlib.import_module(f"rlplan.memory.{module}")', "module_named(module)"),
            ("def public_names(", MODULE_NAMED + "def public_names("),
            ("from typing import Any\n", "from types import ModuleType\nfrom typing import Any\n"),
        )
    page = root / "tests/docs/test_estimates.py"
    if page.exists():
        in_block(page, "MODULES", one)
        replace(
            page,
            ('    importlib.import_module(f"rlplan.memory.{module}")\n', ""),
            ("import importlib\n\n", ""),
        )
