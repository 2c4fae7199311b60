"""Move the modules of a clone of rlplan into rooms, and rewrite whatever names them: `python move.py CLONE`.

Run it on a tree that has not been moved. It fails before it has changed anything where a folder would hold more than 12
modules, and prints which rows of table.py found no module (it was renamed or deleted meanwhile).
"""

import ast
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path, PurePosixPath

import patches
from table import DOCSTRINGS, FOLDERS, ROWS

HERE = Path(__file__).resolve().parent
RENAMED = Path(__file__).parent.parent / "words" / "modules.py"
TOPS = ("rlplan", "rlplan_cli", "tests", "benchmarks")
NOT_REWRITTEN = ("CHANGELOG.md",)
TEXTS = (".py", ".md", ".toml", ".yaml", ".json", ".txt", ".sh", ".cfg", ".j2", ".html", ".csv", "Makefile", "run")
PAGES = {f"docs/{page}.md": f"rlplan/{package}/" for page, package in (("timing", "timing"), ("memory-model", "memory"))}
MAX_MODULES = 12
LINE = 120
MARK = "\0"
"""Put into every name that is already new, so that no later pass takes it for an old one; taken out at the end."""


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def dotted(path: str) -> str:
    """cli/rlplan_cli/render.py -> rlplan_cli.render."""
    return path.removeprefix("cli/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Move:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = [f for f in git(root, "ls-files", "--cached", "--others", "--exclude-standard").split("\n") if f]
        self.files = [f for f in self.files if (root / f).is_file() and not (root / f).is_symlink()]
        self.python = [f for f in self.files if f.endswith(".py")]
        self.rows = self.active_rows()
        self.modules = {dotted(old): dotted(new) for old, new in self.rows.items()}
        self.names = {old: top_level_names(root / old) for old in self.rows}
        self.notes: list[str] = []
        self.by_base = defaultdict(list)
        for file in self.python:
            self.by_base[PurePosixPath(file).name].append(file)

    # ---------------------------------------------------------------------------------------------------- the table

    def active_rows(self) -> dict[str, str]:
        """Rows whose module is there, under its old name or under the one that the words' script has given it."""
        rows, gone = {}, []
        for old, new in ROWS.items():
            other = renamed_module(old)
            if old in self.files:
                rows[old] = new
            elif other in self.files:
                keeps_name = PurePosixPath(old).name == PurePosixPath(new).name
                rows[other] = str(PurePosixPath(new).with_name(PurePosixPath(other).name)) if keeps_name else new
            elif new not in self.files:
                gone.append(old)
        for old in gone:
            print(f"no longer there: {old}")
        return rows

    def check_sizes(self) -> None:
        """Fails where a folder would hold too much."""
        held, strangers = Counter(), defaultdict(list)
        for file in self.python:
            new = PurePosixPath(self.rows.get(file, file))
            if new.parts[0] in ("rlplan", "cli", "tests", "benchmarks") and new.name not in ("__init__.py", "conftest.py"):
                held[str(new.parent)] += 1
                if file not in self.rows and file not in ROWS.values():
                    strangers[str(new.parent)].append(new.name)
        wrong = [folder for folder, number in held.items() if number > MAX_MODULES]
        for folder in wrong:
            print(f"{folder} would hold {held[folder]} modules; without a row in table.py: {sorted(strangers[folder])}")
        if wrong:
            sys.exit("give them rows in table.py")
        roomy = {str(PurePosixPath(old).parent) for old in ROWS}
        for folder in sorted(roomy & set(strangers)):
            print(f"without a row, stay in {folder}: {' '.join(sorted(strangers[folder]))}")

    # ------------------------------------------------------------------------------------------------- names in texts

    def rewrite(self, file: str) -> None:
        path = self.root / file
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            return
        assert MARK not in text, file
        new = self.from_imports(text)
        new = self.dotted_names(new)
        new = self.paths(file, new)
        if file.endswith((".py", ".md")):
            new = self.prose(file, new)
        if file in self.rows:
            new = self.depths(file, new)
        new = new.replace(MARK, "")
        if new != text:
            if file.endswith((".py", ".md")):
                new = rewrapped(file, text, new)
            path.write_text(new, encoding="utf-8")

    def from_imports(self, text: str) -> str:
        """`from package import module`, where the module has moved."""
        renames: dict[str, str] = {}

        def one(match: re.Match[str]) -> str:
            package, listed = match.group(1), match.group(2)
            if package in self.modules:
                return match.group(0)
            names = [n.strip() for n in re.sub(r"#.*", "", listed.strip("()")).split(",") if n.strip()]
            moved = [n for n in names if f"{package}.{n.split(' as ')[0]}" in self.modules]
            if not moved:
                return match.group(0)
            kept = [n for n in names if n not in moved]
            parts = [f"from {mark(package)} import {', '.join(kept)}"] if kept else []
            for name in moved:
                base, _, alias = name.partition(" as ")
                to, _, new_base = self.modules[f"{package}.{base}"].rpartition(".")
                if not alias and new_base != base:
                    rest = text.replace(match.group(0), "")
                    if re.search(rf"\b{new_base}\b", rest):
                        alias = base
                    else:
                        renames[base] = new_base
                parts.append(f"from {mark(to)} import {new_base}" + (f" as {alias}" if alias else ""))
            line = text[: match.start()].rpartition("\n")[2]
            return (f"\n{line}" if not line.strip() else "; ").join(parts)

        tops = "|".join(TOPS)
        text = re.sub(rf"\bfrom ((?:{tops})(?:\.\w+)*) import (\([^()]*\)|\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)", one, text)
        for old, new in renames.items():
            text = re.sub(rf"(?<![\w.]){old}(?=\.\w)|(?<=[(\[ ]){old}(?=[,)\]])", new, text)
        return text

    def dotted_names(self, text: str) -> str:
        def one(match: re.Match[str]) -> str:
            parts = match.group(0).split(".")
            for length in range(len(parts), 1, -1):
                if (new := self.modules.get(".".join(parts[:length]))) is not None:
                    return ".".join([mark(new), *parts[length:]])
            return match.group(0)

        return re.sub(rf"(?<![\w./-])(?:{'|'.join(TOPS)})(?:\.\w+)+", one, text)

    def paths(self, file: str, text: str) -> str:
        def one(match: re.Match[str]) -> str:
            up, token = match.group(1), match.group(2)
            new = self.new_path(file, token, match.string[: match.start()])
            return up + new.replace("/", f"{MARK}/", 1) if new else match.group(0)

        text = re.sub(r"(?<![\w./-])((?:\.\./)*)((?:[\w-]+/)*\w+\.py)(?!\w)", one, text)
        for old, new in FOLDERS.items():
            text = re.sub(rf"(?<![\w/-]){old}(?![\w/.-]*\w)", new, text)
            if old.startswith("rlplan/"):
                short, now = old.removeprefix("rlplan/"), new.removeprefix("rlplan/")
                text = re.sub(rf"(?<![\w/-]){short}(?![\w/.-]*\w)", now, text)
        return text

    def new_path(self, file: str, token: str, before: str) -> str:
        """What a path in a text is called now, or "" where it stays."""
        if token in self.rows:
            return self.rows[token]
        ends = [f for f in self.python if f.endswith(f"/{token}")]
        if "/" in token:
            if len(ends) != 1 or ends[0] not in self.rows:
                return ""
            start, new = ends[0].removesuffix(token), self.rows[ends[0]]
            return new.removeprefix(start) if new.startswith(start) else new.partition("/")[2]
        if not file.endswith((".py", ".md")):
            return ""
        beside = str(PurePosixPath(file).with_name(token))
        package = PAGES.get(file, "-")
        ends = [f for f in ends if f.startswith(package)] or ends  # a page about one package means its modules
        named = beside if beside in ends else ends[0] if len(ends) == 1 else ""
        if named not in self.rows or PurePosixPath(self.rows[named]).name == token:
            return ""
        new, place = PurePosixPath(self.rows[named]), PurePosixPath(self.rows.get(file, file)).parent
        said = new.name if new.parent == place else f"{new.parent.name}/{new.name}"
        self.notes.append(f"{file}: {token} -> {said}   ...{before[-60:]!r}")
        return said

    def prose(self, file: str, text: str) -> str:
        """`module.function` in backticks, where the module has another name now or its folder is named."""

        def one(match: re.Match[str]) -> str:
            first, second, *rest = parts = match.group(1).split(".")
            if rest:
                found = [o for o in self.rows if dotted(o).endswith(f".{first}.{second}")]
                if len(found) == 1 and rest[0] in self.names[found[0]]:
                    return "`" + ".".join([tail(self.rows[found[0]]), *rest])
            found = [o for o in self.rows if PurePosixPath(o).stem == first and second in self.names[o]]
            if len(found) == 1 and PurePosixPath(self.rows[found[0]]).stem != first:
                return "`" + ".".join([tail(self.rows[found[0]]), *parts[1:]])
            return match.group(0)

        def path(match: re.Match[str]) -> str:
            new = self.new_path(file, f"{match.group(1)}.py", "")
            return f"`{new.removesuffix('.py')}`" if new else match.group(0)

        text = re.sub(r"(?<!`)`((?:[\w-]+/)+\w+)`", path, text)
        return re.sub(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)", one, text)

    def depths(self, file: str, text: str) -> str:
        """`Path(__file__)` and its parents: a folder further down counts one more."""
        deeper = self.rows[file].count("/") - file.count("/")

        def one(match: re.Match[str]) -> str:
            chain = match.group(2)
            levels = int(chain[9:-1]) + 1 if chain.startswith(".parents[") else chain.count(".parent")
            if levels == 1:
                self.notes.append(f"{file}: looks beside itself: {match.group(0)}")
                return match.group(0)
            return f"{match.group(1)}.parents[{levels - 1 + deeper}]"

        return re.sub(r"(Path\(__file__\)(?:\.resolve\(\))?)(\.parents\[\d+\]|(?:\.parent\b)+)", one, text)

    # --------------------------------------------------------------------------------------------------- whole files

    def move_files(self) -> None:
        for old, new in self.rows.items():
            (self.root / new).parent.mkdir(parents=True, exist_ok=True)
            git(self.root, "mv", old, new)
        for folder, docstring in DOCSTRINGS.items():
            made = self.root / folder / "__init__.py"
            if made.parent.is_dir() and not (made.exists() and made.read_text().strip()):
                made.write_text(f'"""{docstring}"""\n', encoding="utf-8")
        for file in self.python:
            path = self.root / file
            if path.name == "__init__.py" and path.exists() and not [
                p for p in path.parent.iterdir() if p.name not in ("__init__.py", "__pycache__")
            ]:
                git(self.root, "rm", "-q", "-f", file)

    def makefile(self) -> None:
        """The parts of `make nightly`, every path in full."""
        path = self.root / "Makefile"
        text = path.read_text()

        def one(match: re.Match[str]) -> str:
            value = re.sub(r"\s*\\\n\s*", " ", match.group(2)).strip()
            if found := re.fullmatch(r"\$\(addprefix (\S+?),(.*)\)", value):
                value = " ".join(found.group(1) + name for name in found.group(2).split())
            paths, lines = [self.rows.get(p, p) for p in value.split()], [match.group(1)]
            for one in paths:
                if len(lines[-1]) + len(one) > 116:
                    lines.append("  " + one)
                else:
                    lines[-1] += " " + one
            return " \\\n".join(lines)

        path.write_text(re.sub(r"(?m)^(NIGHTLY_\w+ :=)((?:.*\\\n)*.*)$", one, text), encoding="utf-8")

    def siblings(self) -> None:
        """A file that is looked for beside a module must have moved with it."""
        for file in self.rows.values():
            path = self.root / file
            for name in re.findall(r'__file__\)(?:\.with_name\(|\.parent / )"([\w.]+)"', path.read_text()):
                if not (path.parent / name).exists():
                    sys.exit(f"{file} looks for {name} beside itself, which is not there")


def rewrapped(file: str, old: str, new: str) -> str:
    """Prose whose lines the longer names have made too long: what is too much goes on to the next line."""
    before, lines, at = set(old.split("\n")), new.split("\n"), 0
    in_strings = set()
    if file.endswith(".py"):
        for node in ast.walk(ast.parse(new)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno != node.lineno:
                in_strings |= {lines[number - 1] for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    carried = False  # the line has got words of the one above
    while at < len(lines):
        line = lines[at]
        is_prose = carried or line in in_strings or (file.endswith(".md") and line not in before)
        if len(line) <= LINE or not is_prose or line.lstrip().startswith("|"):
            at, carried = at + 1, False
            continue
        cut = line.rfind(" ", 0, LINE + 1)
        marker = re.match(r" *(?:[-*] |\d+\. )?", line)
        indent = " " * len(marker.group() if marker else "")
        lines[at], rest = line[:cut], line[cut + 1 :]
        after = lines[at + 1] if at + 1 < len(lines) else ""
        joins = after.strip() and after.startswith(indent) and after[len(indent)] not in ' "|>#-*' and rest[-3:] != '"""'
        lines[at + 1 : at + 2 if joins else at + 1] = [f"{indent}{rest} {after.lstrip()}" if joins else indent + rest]
        at, carried = at + 1, True
    return "\n".join(lines)


def mark(name: str) -> str:
    top, dot, rest = name.partition(".")
    return f"{top}{MARK}{dot}{rest}"


def tail(path: str) -> str:
    """serving.kv: a module's room and name, as pages call it; the name alone where it lies in no room."""
    parts = dotted(path).split(".")
    return ".".join(parts[-2:] if len(parts) > 3 else parts[-1:])


def top_level_names(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def renamed_module(old: str) -> str:
    """The path that the words' script gives to a module or its test, where that script is there; else the same."""
    if not RENAMED.exists():
        return old
    path = PurePosixPath(old)
    prefix = next((p for p in ("test_", "live_") if old.startswith("tests/") and path.name.startswith(p)), "")
    for stem, new, package in runpy.run_path(str(RENAMED))["MODULES"]:
        folder = package.replace("rlplan/", "tests/", 1) if old.startswith("tests/") else package
        if path.stem == prefix + stem and old.startswith(f"{folder}/"):
            return str(path.with_name(f"{prefix}{new}.py"))
    return old


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    patches.before(root)
    move = Move(root)
    move.check_sizes()
    if not move.rows:
        sys.exit("nothing to move: this tree has its rooms")
    for file in move.files:
        if file.endswith(TEXTS) and file not in NOT_REWRITTEN:
            move.rewrite(file)
    move.makefile()
    move.move_files()
    move.siblings()
    patches.after(root)
    for note in move.notes:
        print(note)
    for name, target in patches.COPIED.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / name, root / target)
    git(root, "add", "-A")
    python = root / ".venv" / "bin"
    subprocess.run([python / "ruff", "check", "-q", "--fix", "--select", "I,F401", "."], cwd=root, check=False)
    subprocess.run([python / "ruff", "format", "-q", "."], cwd=root, check=True)
    print(f"{len(move.rows)} modules moved")


if __name__ == "__main__":
    main()
