"""Renames private words to the field's terms in a clone: symbols.py, modules.py and phrases.py beside this say which.

Usage: python rename.py CLONE. Nothing depends on folders but packages (`rlplan/runtime` and so on); it may be run again.
Prints rows that matched nothing, names that were there already in a file (collisions), and lines that stay too long.
"""

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from modules import MODULES  # noqa: E402
from phrases import PHRASES, WORDS  # noqa: E402
from symbols import FILES, NAMES, PATTERNS, STRINGS  # noqa: E402

WIDTH = 120
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".j2", ".html", ".css", ".sh", ".txt", ".cfg"}
HISTORY = {"CHANGELOG.md", "docs/decisions.md"}
"""Tell of what was: only modules' paths and names with an underscore or a capital inside change there."""
LEFT_ALONE = ("reports/", "requirements/", "tests/goldens/", "rlplan/spec/architectures/", "rlplan/accuracy/data/")
QUOTE = r"(?:[rbfRBF]{0,2}(?:\"\"\"|'''|\"|'))"


class Report:
    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.collisions: set[str] = set()
        self.modules: set[str] = set()
        self.long: list[str] = []


def tracked(root: Path) -> list[Path]:
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    return [root / name for name in out.stdout.splitlines() if (root / name).is_file()]


def is_text(path: Path, root: Path) -> bool:
    name = path.relative_to(root).as_posix()
    return (path.suffix in TEXT or path.name == "Makefile") and not name.startswith(LEFT_ALONE)


# ------------------------------------------------------------------------------------------------------- scopes


def bases(name: str) -> set[str]:
    """The base names that a file may be asked for by: its own, without `test_`, and as it was or will be called."""
    stem = Path(name).stem
    found = {stem, stem.removeprefix("test_")}
    for old, new, _ in MODULES:
        if old in found:
            found.add(new)
        if new in found:
            found.add(old)
    return found


def in_scope(scope: str, name: str, text: str = "") -> bool:
    """scope: words; `base` of a file, `base==` without `test_`, `package/` that its path has (`runtime/` for
    rlplan/runtime and tests/runtime), `~word` that it holds, `+word` that it must fit too, `!word` for all but that;
    empty for everywhere.
    """
    words = scope.split()
    wanted = [word for word in words if word[0] not in "!+"]
    needed = [word[1:] for word in words if word.startswith("+")]
    unwanted = [word[1:] for word in words if word.startswith("!")]

    def fits(word: str) -> bool:
        if word.startswith("~"):
            return re.search(rf"(?<!\w){re.escape(word[1:])}(?!\w)", text) is not None
        if word.endswith("/"):
            return f"/{word}" in f"/{name}"
        if word.endswith("=="):
            return Path(name).stem == word[:-2]
        return word in bases(name)

    return (not wanted or any(map(fits, wanted))) and all(map(fits, needed)) and not any(map(fits, unwanted))


# ------------------------------------------------------------------------------------------------------ symbols


def is_distinct(name: str) -> bool:
    """Whether a name is no word of English, so that it means the symbol wherever it stands."""
    return "_" in name.strip("_") or bool(re.search(r"[a-z][A-Z]", name))


class Names:
    """The names of one file: `NAMES` rows are (old, new, scope[, form]); form `attr`: behind a dot or as a keyword or
    field alone; `local`: never behind a dot.
    """

    def __init__(self, name: str, text: str, report: Report) -> None:
        self.file, self.report, self.text = name, report, text
        self.rows = {row[0]: row for row in reversed(NAMES) if in_scope(row[2], name, text)}

    def new(self, old: str, before: str, after: str, depth: int = 0) -> str:
        row = self.rows.get(old)
        if row is None:
            return old
        form = row[3] if len(row) > 3 else ""
        is_field = after == ":" and not before.strip() and not depth
        is_keyword = after == "=" and before in ("(", ",", "\n") and depth > 0
        if form == "attr" and not (before in (".", "def") or is_keyword or is_field):
            return old
        if form == "local" and before == ".":
            return old
        self.report.hits[key_of(row)] += 1
        return row[1]

    def in_code(self, text: str) -> str:
        """Python inside of an f-string's braces."""

        def each(found: re.Match[str]) -> str:
            return self.new(found[0], text[max(0, found.start() - 1) : found.start()], "")

        return re.sub(r"(?<![\w'.])[A-Za-z_]\w*\b(?!')|(?<=\.)[A-Za-z_]\w*\b", each, text)

    def in_prose(self, text: str) -> str:
        """Strings, comments and pages: distinct names anywhere, plain ones in backticks or where a field is documented."""

        def each(found: re.Match[str]) -> str:
            old = found[0]
            if old not in self.rows or (old.islower() and not is_distinct(old) and not self.file.endswith(".py")):
                return old
            before, after = text[: found.start()][-1:], text[found.end() :][:2]
            path = re.search(r"(?:rlplan|tests|rlplan_cli)(?:\.\w+)*\.$", text[max(0, found.start() - 90) : found.start()])
            if path and path[0] + old in self.report.modules:
                return old
            ticked = before in "`." and "`" in text[max(0, found.start() - 60) : found.start()]
            if is_distinct(old) or (before == "`" or (before == "." and ticked)) or (
                after[:1] == ":" and after[1:] in (" ", "\n", "") and self.file.endswith(".py")
            ):
                if len(self.rows[old]) > 3 and self.rows[old][3] == "local" and not is_distinct(old):
                    return old
                self.report.hits[key_of(self.rows[old])] += 1
                return self.rows[old][1]
            return old

        return re.sub(r"[A-Za-z_]\w*", each, text)

    def in_plain_string(self, token: str) -> str:
        """A program in triple quotes, prose with lines of a doctest, or prose."""
        body = re.fullmatch(r'([rR]?""")(.*)(""")', token, re.DOTALL)
        if body and "\n" in body[2] and is_program(body[2]):
            return body[1] + rename_code(body[2], self, self.report) + body[3]
        parts = re.split(r"(?m)^([ \t]*(?:>>>|\.\.\.) .*\n?)", token)
        return "".join(self.in_doctest(part) if at % 2 else self.in_prose(part) for at, part in enumerate(parts))

    def in_doctest(self, line: str) -> str:
        lead, code = re.match(r"(\s*\S+ )(.*\n?)", line, re.DOTALL).groups()
        try:
            return lead + rename_code(code, self, self.report)
        except (tokenize.TokenError, IndentationError):
            return lead + self.in_code(code)

    def in_string(self, token: str) -> str:
        """A string token: prose, or where it is an f-string prose with Python in braces; a whole name by itself."""
        prefix = re.match(r"[A-Za-z]*", token)[0].lower()
        bare = token[len(prefix) :].strip("\"'")
        for row in STRINGS:
            if bare == row[0] and in_scope(row[2], self.file, self.text):
                self.report.hits[key_of(row)] += 1
                return token.replace(row[0], row[1])
        if re.fullmatch(r"[A-Za-z_.]+(?:\[[\w\[\], .|]+\])?(?: \| None)?", bare) and (bare[0].isupper() or "[" in bare):
            return self.in_code(token)
        if "f" not in prefix:
            return self.in_plain_string(token)
        parts, at, depth, start = [], 0, 0, 0
        while at < len(token):
            two = token[at : at + 2]
            if depth == 0 and two in ("{{", "}}"):
                at += 2
                continue
            if token[at] == "{":
                if depth == 0:
                    parts.append(self.in_prose(token[start:at]))
                    start = at
                depth += 1
            elif token[at] == "}" and depth:
                depth -= 1
                if depth == 0:
                    parts.append(self.in_code(token[start : at + 1]))
                    start = at + 1
            at += 1
        return "".join([*parts, self.in_prose(token[start:])])


def is_program(text: str) -> bool:
    """Whether a string is a program that a test runs."""
    try:
        nodes = ast.parse(textwrap.dedent(text)).body
    except SyntaxError:
        return False
    wanted = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef, ast.With)
    return any(isinstance(node, wanted) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) for node in nodes)


def key_of(row: tuple[str, ...]) -> str:
    return " | ".join(map(str, row))


def each_token(text: str) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(text).readline)


def with_tokens(text: str, change: Callable[[list[tokenize.TokenInfo], int], str | None]) -> str:
    """The text with tokens replaced; None leaves one."""
    tokens = list(each_token(text))
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for index in range(len(tokens) - 1, -1, -1):
        token = tokens[index]
        new = change(tokens, index)
        if new is not None and new != token.string:
            begin, end = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
            text = text[:begin] + new + text[end:]
    return text


def rename_symbols(text: str, name: str, report: Report) -> str:
    names = Names(name, text, report)
    if not name.endswith(".py"):
        return names.in_prose(text)
    present = {token.string for token in each_token(text) if token.type == tokenize.NAME}
    for old, row in names.rows.items():
        if old in present and row[1] in present and "." not in row[1]:
            report.collisions.add(f"{name}: {old} -> {row[1]} is there already")

    return rename_code(text, names, report)


def rename_code(text: str, names: Names, report: Report) -> str:
    """Python, with names, strings and comments replaced."""
    facts: dict[tuple[int, int], tuple[int, bool]] = {}
    depth, statement = 0, ""
    was_import = False
    for token in each_token(text):
        if token.type == tokenize.NEWLINE:
            statement, was_import = "", False
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT):
            if token.string == "import":
                was_import = True
            is_path = statement.startswith(("from", "import")) and (
                not was_import or f"{statement.split()[1]}.{token.string}" in report.modules
                if statement.startswith("from")
                else True
            )
            facts[token.start] = depth, is_path
            depth += (token.string in "([{") - (token.string in ")]}") if token.type == tokenize.OP else 0
            joined = "" if token.string == "." or statement.endswith(".") else " "
            statement = statement + joined + token.string if statement else token.string

    def change(tokens: list[tokenize.TokenInfo], index: int) -> str | None:
        token = tokens[index]
        if token.type == tokenize.NAME:
            before = tokens[index - 1].string if index else ""
            after = tokens[index + 1].string if index + 1 < len(tokens) else ""
            inside, is_path = facts[token.start]
            return None if is_path else names.new(token.string, before, after, inside)
        if token.type == tokenize.STRING:
            ahead = [each.string for each in tokens[max(0, index - 4) : index]]
            if ahead[-2:-1] in (["parametrize"], ["usefixtures"]) or ahead == ["fixture", "(", "name", "="]:
                return names.in_code(token.string)
            return names.in_string(token.string)
        if token.type == tokenize.COMMENT:
            return names.in_prose(token.string)
        return None

    return with_tokens(text, change)


# ------------------------------------------------------------------------------------------------------ phrases


def pattern_of(phrase: str) -> re.Pattern[str]:
    """A phrase whose spaces may be a line's end in a docstring, a comment, a page or between two literals."""
    gap = rf"(?:[ \t]*\n[ \t]*(?:#[ \t]|>[ \t])?|[ ]?{QUOTE}[ \t]*\n[ \t]*{QUOTE}[ ]?|[ ])"
    words = [re.escape(word) for word in phrase.split(" ")]
    head = r"(?<![A-Za-z0-9_])" if phrase[0].isalnum() else ""
    tail = r"(?![A-Za-z0-9_])" if phrase[-1].isalnum() else ""
    return re.compile(head + gap.join(words) + tail)


COMPILED = [(pattern_of(row[0]), row) for row in PHRASES]
PLAIN = [(re.compile(row[0]), row) for row in WORDS]


def replace_phrases(text: str, name: str, report: Report) -> str:
    for pattern, row in COMPILED:
        if row[0].split(" ")[0] not in text or (len(row) > 2 and not in_scope(row[2], name, text)):
            continue
        text, count = pattern.subn(lambda _, new=row[1]: new, text)
        report.hits["phrase: " + row[0]] += count
    return text


def replace_words(text: str, name: str, report: Report) -> str:
    """`WORDS`: patterns in prose alone, never in code nor in a string that is one word."""

    def prose(part: str) -> str:
        for pattern, row in PLAIN:
            if len(row) > 2 and not in_scope(row[2], name, text):
                continue
            part, count = pattern.subn(row[1], part)
            report.hits["word: " + row[0]] += count
        return part

    if not name.endswith(".py"):
        return prose(text) if name.endswith((".md", ".j2", ".html")) or name == "Makefile" or "examples/" in name else text

    def change(tokens: list[tokenize.TokenInfo], index: int) -> str | None:
        token = tokens[index]
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            return prose(token.string)
        return None

    return with_tokens(text, change)


def apply_patterns(text: str, name: str, report: Report) -> str:
    """`PATTERNS`: regular expressions over whole files, for what no other row can say."""
    for old, new, scope in PATTERNS:
        if in_scope(scope, name, text):
            text, count = re.subn(old, new, text)
            report.hits["pattern: " + old] += count
    return text


# ------------------------------------------------------------------------------------------------------ modules


def package_of(name: str) -> str:
    """`rlplan/runtime` of a file of the library or of its tests; its top folders else."""
    parts = name.split("/")
    if parts[0] == "tests" and len(parts) > 2:
        return "rlplan/" + parts[1] if parts[1] != "cli" else "cli"
    return "/".join(parts[:2]) if parts[0] == "rlplan" else parts[0]


def move_modules(root: Path, report: Report) -> dict[str, str]:
    """Moves files; old dotted name -> new one."""
    moved: dict[str, str] = {}
    for path in tracked(root):
        name = path.relative_to(root).as_posix()
        if path.suffix != ".py":
            continue
        for old, new, under in MODULES:
            if package_of(name) not in under.split():
                continue
            for prefix in ("test_", "live_") if name.startswith("tests/") else ("",):
                if path.stem == prefix + old:
                    target = path.with_name(f"{prefix}{new}.py")
                    subprocess.run(["git", "mv", str(path), str(target)], cwd=root, check=True)
                    report.hits[f"module: {old} {under}"] += 1
                    moved[dotted(name)] = dotted(target.relative_to(root).as_posix())
    return moved


def dotted(name: str) -> str:
    return name.removesuffix(".py").removeprefix("cli/").replace("/", ".")


def rename_modules(text: str, name: str, moved: dict[str, str]) -> str:
    for old, new in moved.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, text)
        if old.count(".") > 1:
            inner = old.partition(".")[2]
            text = re.sub(rf"(?<![\w.]){re.escape(inner)}(?=[.`])", new.partition(".")[2], text)
        last, now = old.rpartition(".")[2], new.rpartition(".")[2]
        parent = old.rpartition(".")[0]
        pattern = rf"(from {re.escape(parent)} import (?:\([^)]*?|[^\n(]*?))\b{last}\b"
        if name.endswith(".py") and re.search(pattern, text):
            text = re.sub(pattern, rf"\g<1>{now}", text)
            text = re.sub(rf"(?<![\w.\"'`/]){last}\.(?=\w)", f"{now}.", text)
        old_path, new_path = old.replace(".", "/"), new.replace(".", "/")
        for top in ("", "rlplan/", "tests/", "tests/runtime/", "rlplan/runtime/"):
            short_old, short_new = old_path.removeprefix(top), new_path.removeprefix(top)
            if "/" in short_old:
                text = re.sub(rf"(?<![\w-]){re.escape(short_old)}(\.py)?\b(?![\w-])", rf"{short_new}\1", text)
        parts = old_path.split("/")
        same = package_of(name) == package_of(old_path + ".py") or last.startswith("test_")
        short = "/".join(parts[-2:])
        text = re.sub(rf"(?<![\w/]){short}\.py\b", "/".join(new_path.split("/")[-2:]) + ".py", text)
        if same or Counter(row[0] for row in MODULES)[last] == 1:
            text = re.sub(rf"(?<![\w/.-]){last}\.py\b", f"{now}.py", text)
    return text


# -------------------------------------------------------------------------------------------------- long lines

MARK = re.compile(r"\s*(?:[-*] |\d+\. |#|\||>>>|[A-Z]\w*(?: \w+)?: |`?\w+`?: |\"\"\"|$)")


def shortened(text: str, name: str, report: Report, before: str) -> str:
    """Lines of prose that a replacement made too long, with their last words on the next line."""
    lines, out, index = text.split("\n"), [], 0
    as_they_were = set(before.split("\n"))
    fenced = False
    while index < len(lines):
        line = lines[index]
        fenced ^= line.lstrip().startswith("```") and name.endswith(".md")
        index += 1
        if len(line) <= WIDTH or line in as_they_were or fenced or line.lstrip().startswith(("|", ">>>")):
            out.append(line)
            continue
        indent = re.match(r"\s*", line)[0]
        comment = re.match(r"\s*# ", line)
        lead = comment[0] if comment else indent
        if name.endswith(".py") and not comment and not in_docstring(out, line):
            out.append(line)
            continue
        bullet = re.match(r"\s*(?:[-*] |\d+\. )", line)
        if bullet:
            lead = " " * len(bullet[0])
        one_line = name.endswith(".py") and line.lstrip().startswith('"""') and line.rstrip().endswith('"""') and line.count('"""') == 2
        closing = ""
        if name.endswith(".py") and line.rstrip().endswith('"""'):
            line, closing = line.rstrip()[:-3], '"""'
        cut = line.rfind(" ", 0, WIDTH + 1)
        if cut <= len(lead):
            out.append(line + closing)
            continue
        head, rest = line[:cut].rstrip(), line[cut + 1 :]
        out.append(head)
        follows = lines[index] if index < len(lines) else ""
        joins = (
            not closing
            and follows.strip()
            and bool(re.match(r"\s*# ", follows)) == bool(comment)
            and re.match(r"\s*", follows)[0] == re.match(r"\s*", lead)[0]
            and (comment or not MARK.match(follows))
        )
        if joins:
            lines[index] = lead + rest + " " + follows[len(lead) :]
        elif closing and (one_line or True):
            module_level = indent == ""
            lines[index:index] = [lead + rest + (closing if module_level else "")] + ([] if module_level else [indent + closing])
        else:
            lines[index:index] = [lead + rest]
    for number, line in enumerate(out, 1):
        if len(line) > WIDTH and name.endswith(".py"):
            report.long.append(f"{name}:{number}")
    return "\n".join(out)


def with_split_strings(text: str) -> str:
    """Single-line literals on lines that are too long, as two literals side by side."""
    lines = text.split("\n")
    depths: dict[tuple[int, int], int] = {}
    depth = 0
    for token in each_token(text):
        depths[token.start] = depth
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")

    def change(tokens: list[tokenize.TokenInfo], index: int) -> str | None:
        token = tokens[index]
        row, column = token.start
        line = lines[row - 1]
        if token.type != tokenize.STRING or len(line) <= WIDTH or '"""' in token.string or token.end[0] != row:
            return None
        prefix = re.match(r"[A-Za-z]*", token.string)[0]
        body = token.string[len(prefix) + 1 : -1]
        if token.string[len(prefix)] != '"' or len(body) < 60:
            return None
        most, braces, best = WIDTH - column - 6, 0, 0
        for at, letter in enumerate(body[: max(20, most)]):
            braces += (letter == "{") - (letter == "}") if "f" in prefix else 0
            if letter == " " and not braces:
                best = at
        if best < 20:
            return None
        first, second = f'{prefix}"{body[: best + 1]}"', f'{prefix}"{body[best + 1 :]}"'
        first = first.removeprefix("f") if "f" in prefix and "{" not in first else first
        second = second.removeprefix("f") if "f" in prefix and "{" not in second else second
        both = f"{first}\n{second}"
        return both if depths[token.start] else f"(\n{both}\n)"

    return with_tokens(text, change)


def in_docstring(before: list[str], line: str) -> bool:
    """Whether a line begins in a triple-quoted string, or is one."""
    count = sum(each.count('"""') for each in before)
    return count % 2 == 1 or line.lstrip().startswith('"""')


# ---------------------------------------------------------------------------------------------------------- all


def run(root: Path) -> Report:
    report = Report()
    report.modules = {dotted(path.relative_to(root).as_posix()) for path in tracked(root) if path.suffix == ".py"}
    for path in tracked(root):
        name = path.relative_to(root).as_posix()
        if not is_text(path, root):
            continue
        before = text = path.read_text(encoding="utf-8")
        if name not in HISTORY:
            text = replace_phrases(text, name, report)
            text = apply_patterns(text, name, report)
            text = rename_symbols(text, name, report)
            text = replace_words(text, name, report)
        if text != before:
            if name.endswith((".py", ".md")):
                text = shortened(text, name, report, before)
            if name.endswith(".py"):
                text = with_split_strings(text)
            path.write_text(text, encoding="utf-8")
    moved = move_modules(root, report)
    for path in tracked(root):
        name = path.relative_to(root).as_posix()
        if not is_text(path, root):
            continue
        before = path.read_text(encoding="utf-8")
        text = rename_modules(before, name, moved)
        if text != before:
            if name.endswith((".py", ".md")):
                text = shortened(text, name, report, before)
            path.write_text(text, encoding="utf-8")
    add_changes(root)
    for old, new in FILES:
        if (root / old).is_file():
            subprocess.run(["git", "mv", old, new], cwd=root, check=True)
            report.hits[f"file: {old}"] += 1
    return report


def add_changes(root: Path) -> None:
    """The lines of changelog.md below the first `### Changed`."""
    page, lines = root / "CHANGELOG.md", (HERE / "changelog.md").read_text(encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    if lines.splitlines()[0] not in text:
        page.write_text(text.replace("### Changed\n\n", "### Changed\n\n" + lines, 1), encoding="utf-8")


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    report = run(root)
    rows = [key_of(row) for row in (*NAMES, *STRINGS)]
    rows += ["phrase: " + row[0] for row in PHRASES] + ["word: " + row[0] for row in WORDS]
    rows += ["pattern: " + row[0] for row in PATTERNS]
    rows += [f"module: {old} {under}" for old, _, under in MODULES]
    for row in rows:
        if not report.hits[row]:
            print("no match:", row)
    for line in sorted(report.collisions):
        print("collision:", line)
    for line in report.long:
        print("too long:", line)
    print(sum(report.hits.values()), "replacements,", sum(not report.hits[row] for row in rows), "rows without a match")


if __name__ == "__main__":
    main()
