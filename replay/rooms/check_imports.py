"""After move.py: every module imports, and no text names a module by its old name: `python check_imports.py CLONE`.

Left out: CHANGELOG.md and docs/decisions.md, which tell of what was (the latter is rewritten all the same).
Modules whose import fails for lack of a package that is not ours are counted, not refused.
"""

import re
import subprocess
import sys
from pathlib import Path

from table import ROWS

TOPS = ("rlplan", "rlplan_cli", "tests", "benchmarks")
IMPORT = """
import importlib, json, sys, traceback
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout.split()
    wrong = [*old_names(root, listed), *failed_imports(root, listed)]
    print("\n".join(wrong) or "every module imports; no old name is left")
    sys.exit(bool(wrong))


def old_names(root: Path, listed: list[str]) -> list[str]:
    """Old dotted names that are neither a package now nor a name in one, and old paths."""
    gone = {old for old in ROWS if not (root / old).exists()}
    names = {old.removeprefix("cli/").removesuffix(".py").replace("/", "."): old for old in gone}
    dotted = re.compile(rf"(?<![\w./])(?:{'|'.join(TOPS)})(?:\.\w+)+")
    paths = re.compile(r"(?<![\w/-])(?:[\w-]+/)+\w+\.py\b")
    found = []
    for file in listed:
        if file == "CHANGELOG.md" or not (root / file).is_file():
            continue
        try:
            text = (root / file).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{file}: old path {match.group()}" for match in paths.finditer(text) if match.group() in gone]
        for match in dotted.finditer(text):
            parts = match.group().split(".")
            old = next((o for n in range(len(parts), 1, -1) if (o := ".".join(parts[:n])) in names), None)
            if old and not is_there(root, parts):
                found.append(f"{file}: old name {match.group()}")
    return found


def is_there(root: Path, parts: list[str]) -> bool:
    """Whether every part up to a module is a package: what was a module may be a package of that name now."""
    place = root / ("cli/" if parts[0] == "rlplan_cli" else "") / parts[0]
    for part in parts[1:]:
        if (place / f"{part}.py").is_file():
            return True
        place /= part
        if not place.is_dir():
            return False
    return True


def failed_imports(root: Path, listed: list[str]) -> list[str]:
    import json

    modules = [f for f in listed if f.endswith(".py") and f.split("/")[0] in ("rlplan", "cli", "tests", "benchmarks")]
    names = [f.removeprefix("cli/").removesuffix(".py").removesuffix("/__init__").replace("/", ".") for f in modules]
    names = [name for name in names if not name.endswith(".__main__") and name != "rlplan.runtime.sandbox.runner"]
    done = subprocess.run(
        [root / ".venv/bin/python", "-c", IMPORT], input=json.dumps(names), cwd=root, capture_output=True, text=True
    )
    if done.returncode:
        return [done.stderr[-2000:]]
    failed = json.loads(done.stdout.strip().splitlines()[-1])
    ours = re.compile(rf"No module named '(?:{'|'.join(TOPS)})\b|cannot import name|\b(Name|Attribute|Syntax|Import)Error\b.*rlplan")
    foreign = {name: why for name, why in failed.items() if "No module named" in why and not ours.search(why)}
    for name, why in foreign.items():
        print(f"not imported here, lacks a package: {name}: {why}")
    return [f"{name}: {why}" for name, why in failed.items() if name not in foreign]


if __name__ == "__main__":
    main()
