"""Files, functions and signatures that are too large, cut by the names in them, on the paths before the move.

Each cut does nothing where what it cuts is gone or small enough; so that it can run on a changed tree.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

MAX_LINES = 400


class Source:
    """A Python file, and the lines of what it defines, with decorators and the comments above."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text("utf-8")
        self.lines, self.tree = self.text.split("\n"), ast.parse(self.text)

    def span(self, node: ast.stmt) -> tuple[int, int]:
        """From the first comment or decorator to the last line; 0-based, the end excluded."""
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        while start and re.match(r"\s*# (?!-{5})", self.lines[start - 1]):
            start -= 1
        return start, node.end_lineno or 0

    def imports(self) -> str:
        nodes = [n for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        return "\n".join("\n".join(self.lines[slice(*self.span(n))]) for n in nodes)

    def named(self, names: Sequence[str], within: Sequence[ast.stmt] | None = None) -> list[ast.stmt]:
        """What has one of these names, with the docstring under a constant."""
        body, found = list(self.tree.body if within is None else within), []
        for place, node in enumerate(body):
            if set(bound(node)) & set(names):
                found.append(node)
                after = body[place + 1] if place + 1 < len(body) else None
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    found.append(after)
        return found

    def take(self, nodes: Sequence[ast.stmt]) -> tuple[str, str]:
        """(the text of these nodes, the text without them)."""
        spans = [self.span(n) for n in nodes]
        gone = {line for start, end in spans for line in range(start, end)}
        rest = "\n".join(line for number, line in enumerate(self.lines) if number not in gone)
        pieces = [("\n\n\n" if isinstance(n, ast.FunctionDef | ast.ClassDef) else "\n") + "\n".join(self.lines[a:b])
                  for n, (a, b) in zip(nodes, spans, strict=True)]  # fmt: skip
        return "".join(pieces).strip("\n"), rest


def bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def words(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def too_long(path: Path) -> bool:
    return path.exists() and len(path.read_text().splitlines()) > MAX_LINES


def all_cuts(root: Path) -> None:
    cut_out(root, "tests/emit/test_edits.py", "hostile_edits", ("WORKER", "HOSTILE"),
            "Edits of a bundle that a person could not want: each is refused.")  # fmt: skip
    oracle(root)
    shared_cores(root)
    last_tests(root, "tests/runtime/data/test_loading.py", "test_bad_rows", "test_a_damaged_tokenizer_s_folder_is_one_message",
               "Bad rows of data sets: each is listed, with its line and what is wrong with it.")  # fmt: skip
    trl_config(root / "benchmarks/trl/trl_side.py")
    packed_attention(root / "rlplan/runtime/packed_attention.py")
    trained_rank(root)
    frozen_rank(root)


def cut_out(root: Path, file: str, new: str, names: Sequence[str], docstring: str) -> None:
    """Definitions into a module beside, from which the file imports what it still uses."""
    path = root / file
    if not too_long(path):
        return
    source = Source(path)
    text, rest = source.take(source.named(names))
    taken = [name for node in source.named(names) for name in bound(node)]
    path.with_name(f"{new}.py").write_text(f'"""{docstring}"""\n\n{source.imports()}\n\n{text}\n')
    used = sorted(words(rest) & set(taken) | {n for n in taken if f'"{n}"' in rest})
    path.write_text(with_import(rest, file, new, used))


def with_import(text: str, file: str, new: str, names: Sequence[str]) -> str:
    """`from the module beside import names`, after the other imports; ruff puts it in order."""
    module = f"{file.rpartition('/')[0].replace('/', '.')}.{new}"
    last = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)][-1].end_lineno or 0
    lines = text.split("\n")
    return "\n".join([*lines[:last], f"from {module} import {', '.join(names)}", *lines[last:]])


def last_tests(root: Path, file: str, new: str, first: str, docstring: str) -> None:
    """The test `first` and all behind it into a file of tests beside, with what of the first part it uses."""
    path = root / file
    if not too_long(path):
        return
    source = Source(path)
    places = [place for place, n in enumerate(source.tree.body) if first in bound(n)]
    if not places:
        print(f"cuts.py: no {first} in {file}")
        return
    moved = source.tree.body[places[0] :]
    text, rest = source.take(moved)
    mine = {name for n in source.tree.body if n not in moved for name in bound(n)}
    used = sorted(mine & words(text))
    path.with_name(f"{new}.py").write_text(
        with_import(f'"""{docstring}"""\n\n{source.imports()}\n\n\n{text}\n', file, path.stem, used)
    )
    path.write_text(rest.rstrip("\n") + "\n")


ORACLE = "tests/planner/gpu/oracle.py"


def oracle(root: Path) -> None:
    """The search's oracle: the bytes at each moment, and the enumeration of choices, each into a module of its own."""
    if not too_long(root / ORACLE):
        return
    classes = [n for n in Source(root / ORACLE).tree.body if isinstance(n, ast.ClassDef)]
    moments = next(c.name for c in classes if any(isinstance(m, ast.FunctionDef) and m.name == "nothing" for m in c.body))
    cut_out(root, ORACLE, "oracle_moments", ("PARTS", "Bytes", moments),
            "Bytes of the search's oracle at every moment of a schedule, added up process by process.")  # fmt: skip
    raw_axes(root)


def raw_axes(root: Path) -> None:
    """The oracle's enumeration of choices, into a class that the oracle is one of."""
    path = root / ORACLE
    source = Source(path)
    whole = next(n for n in source.tree.body if isinstance(n, ast.ClassDef) and n.name == "Oracle")
    methods = [n for n in whole.body if isinstance(n, ast.FunctionDef)]
    places = {n.name: place for place, n in enumerate(methods)}
    init = methods[places["__init__"]]
    text, rest = source.take(methods[places["_can_run"] + 1 : places["_engine"]])
    text = re.sub(r"\n\n\n+(?=    )", "\n\n", text)
    constants = [n for n in source.named(("FLAGS", "POWERS")) if set(bound(n)) & words(f"class A:\n{text}")]
    kept, rest = Source_of(path, rest).take(Source_of(path, rest).named([x for n in constants for x in bound(n)]))
    fields = [f"    {a.arg}: {ast.unparse(a.annotation)}" for a in init.args.args if a.annotation]
    head = '"""Every choice of the raw axes of a job, one after the other, for the search\'s oracle."""'
    body = "class RawAxes:\n" + '    """The choices of one job."""\n\n' + "\n".join(fields) + "\n    work: WorkloadSpec\n    lengths: Lengths\n\n"
    needed = "from rlplan.spec.lengths import Lengths\nfrom rlplan.spec.workload import WorkloadSpec\n"
    path.with_name("raw_axes.py").write_text(f"{head}\n\n{source.imports()}\n{needed}\n{kept}\n\n\n{body}{text}\n")
    rest = rest.replace("class Oracle:", "class Oracle(RawAxes):")
    names = ["RawAxes", *sorted(words(rest) & {x for n in constants for x in bound(n)})]
    path.write_text(with_import(re.sub(r"\n{3,}(?=    )", "\n\n", rest), ORACLE, "raw_axes", names))


def Source_of(path: Path, text: str) -> Source:  # noqa: N802
    made = Source(path)
    made.text, made.lines, made.tree = text, text.split("\n"), ast.parse(text)
    return made


def shared_cores(root: Path) -> None:
    """When tasks end that share a host's cores: a rule of the host's, and 405 lines become 392."""
    path, host = root / "rlplan/timing/cpu.py", root / "rlplan/timing/cpu_host.py"
    if not too_long(path):
        return
    source = Source(path)
    found = [n for n in source.tree.body if isinstance(n, ast.FunctionDef) and [a.arg for a in n.args.args] == ["seconds", "num_cores"]]
    name = found[0].name
    text, rest = source.take(found)
    host.write_text(f"{host.read_text().rstrip()}\n\n\n{text.replace(name, name.strip('_'))}\n")
    rest = rest.replace(name, name.strip("_")).rstrip() + "\n"
    path.write_text(with_import(rest, "rlplan/timing/cpu.py", "cpu_host", [name.strip("_")]))


def trl_config(path: Path) -> None:
    """The trainer's settings, a function of their own."""
    text = path.read_text()
    found = re.search(r"(?ms)^    config = (GRPOConfig\(\n.*?^    \))\n", text)
    if found and "_config(settings" not in text:
        made = f'def _config(settings: dict[str, Any]) -> GRPOConfig:\n    """TRL\'s settings for ours."""\n    return {found.group(1)}\n\n\n'
        text = text.replace(found.group(0), "").replace("        args=config,", "        args=_config(settings),")
        path.write_text(text.replace("def main(", made + "def main("))


def packed_attention(path: Path) -> None:
    """Who shares a row comes with the other options."""
    if not path.exists():
        return
    text = path.read_text()
    new = text.replace("    sharing: Sharing | None = None,\n    **options: Any,\n", "    **options: Any,\n")
    if new != text:
        new = new.replace(
            "    sharing: other ranks have the rest of the row's tokens; each attends to all of them with some of the heads.\n    \"\"\"\n",
            "    options: `sharing`, where other ranks have the rest of the row's tokens; each attends to all of them with some of\n"
            '    the heads. The rest is what transformers passes to any attention.\n    """\n    sharing: Sharing | None = options.pop("sharing", None)\n',
        )
        assert 'options.pop("sharing"' in new, path
        path.write_text(new)


def parameters(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*function.args.args, *function.args.kwonlyargs) if a.arg != "self"]


def with_record(source: Source, function: ast.FunctionDef, record: str, kind: str, *, drops: str = "") -> str:
    """The text with `function(self, record: kind)`, its body reading the record's fields. drops: a name it assigned."""
    names = set(parameters(function))
    lines = list(source.lines)
    start, end = function.lineno - 1, function.end_lineno or 0
    body = [n for n in function.body if not (drops and drops in bound(n))]
    reads = [n for b in body for n in ast.walk(b) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    for node in sorted(reads, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = f"{line[: node.col_offset]}{record}.{line[node.col_offset :]}"
    made = [f"    def __init__(self, {record}: {kind}) -> None:"]
    for node in body:
        made += lines[node.lineno - 1 : node.end_lineno]
    return "\n".join([*lines[:start], *made, *lines[end:]])


def wrap_calls(path: Path, called: str, record: str, module: str) -> None:
    """`called(...)` becomes `called(record(...))`."""
    source = Source(path)
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == called]
    calls = [n for n in calls if len(n.args) + len(n.keywords) > 1]
    if not calls:
        return
    lines = source.lines
    for node in sorted(calls, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        last, first = (node.end_lineno or 0) - 1, node.lineno - 1
        lines[last] = f"{lines[last][: node.end_col_offset]}){lines[last][node.end_col_offset :]}"
        at = node.col_offset + len(called) + 1
        lines[first] = f"{lines[first][:at]}{record}({lines[first][at:]}"
    text = "\n".join(lines)
    if f"import {record}" not in text and record not in words(source.text):
        last = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)][-1].end_lineno or 0
        rows = text.split("\n")
        text = "\n".join([*rows[:last], f"from {module} import {record}", *rows[last:]])
    path.write_text(text)


def init_of(source: Source, name: str) -> ast.FunctionDef | None:
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    return None


def callers(root: Path) -> list[Path]:
    return [path for folder in ("rlplan", "tests", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]


def trained_rank(root: Path) -> None:
    """TrainerOnGpu gets the record that it made of its ten arguments."""
    path = root / "rlplan/memory/gpu/trainer.py"
    init = init_of(Source(path), "TrainerOnGpu") if path.exists() else None
    if init is None or len(parameters(init)) <= 8:
        return
    made = next(n for n in init.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call))
    record, kind = bound(made)[0], ast.unparse(made.value.func)
    path.write_text(with_record(Source(path), init, record, kind, drops=record))
    for caller in callers(root):
        wrap_calls(caller, "TrainerOnGpu", kind, "rlplan.memory.gpu.rank")


FROZEN = '''@dataclass(frozen=True)
class FrozenRole:
    """A frozen role, as all its ranks have it in common."""

%s


'''
SAID = {
    "is_sharded": "Whether the weights are cut over all ranks.",
    "cut": "How the policy is cut, which a frozen role follows where another trainer than rlplan's runs it.",
}


def frozen_rank(root: Path) -> None:
    """ScorerOnGpu gets one record instead of ten arguments."""
    path = root / "rlplan/memory/gpu/scorer.py"
    init = init_of(Source(path), "ScorerOnGpu") if path.exists() else None
    if init is None or len(parameters(init)) <= 8:
        return
    source = Source(path)
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    defaults = [*[None] * len(init.args.args[1:]), *init.args.kw_defaults]
    fields = []
    for argument, default in zip(arguments, defaults, strict=True):
        given = f" = {ast.unparse(default)}" if default is not None else ""
        fields.append(f"    {argument.arg}: {ast.unparse(argument.annotation)}{given}".replace("'", '"'))
        if argument.arg in SAID:
            fields.append(f'    """{SAID[argument.arg]}"""')
    text = with_record(source, init, "frozen", "FrozenRole")
    text = re.sub(
        r'class ScorerOnGpu:\n    """(One rank\.[^.]*?`[\w.]+`\.).*?"""\n',
        lambda m: FROZEN % "\n".join(fields) + f'class ScorerOnGpu:\n    """{m.group(1)}"""\n',
        text,
        flags=re.S,
    )
    assert "class FrozenRole" in text, path
    path.write_text(text)
    for caller in callers(root):
        wrap_calls(caller, "ScorerOnGpu", "FrozenRole", "rlplan.memory.gpu.scorer")
    for page in (root / "docs").glob("*.md"):
        said = page.read_text()
        if "`gpu.scorer.FrozenShare" in said and "gpu.scorer.FrozenRole" not in said:
            page.write_text(said.replace("`gpu.scorer.FrozenShare", "`gpu.scorer.FrozenRole`, `gpu.scorer.FrozenShare", 1))
