"""docs/memory-model.md: every formula by name; reports/runtime/memory.md: tables of what is predicted and was measured.

The measured numbers come from the committed reports, the predicted ones from the code as it is.
"""

import ast
import csv
import importlib
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from rlplan.units import MIB
from rlplan.vocabulary import PERSISTENT_KINDS, MemoryKind
from tests.docs.documentation import ALL_KEYS, DOCS, ROOT, plan_example, read, rows

MEMORY_PAGE = read(DOCS / "memory-model.md")
MEASURED_PAGE = read(ROOT / "reports" / "runtime" / "memory.md")
FORMULA_MODULES = (
    *("logits", "activations", "training", "backward", "generation", "micro_batch"),
    *("zero", "optimizers", "block", "block_families", "step_peak", "frozen", "sharding"),
    *("serving.engine", "serving.kv", "serving.peaks", "serving.versions", "serving.weights"),
    *("quantization", "weight_sync.packets"),
    *("checkpoints", "host", "machine.machine", "machine.spread", "roles.process"),
    *("roles.states", "roles.trainer", "roles.scorer", "roles.engine", "predict"),
    *("roles.rank", "roles.exported"),
)


@cache
def module_named(name: str) -> ModuleType:
    """The module of rlplan.memory that pages call by the end of its path: `zero`, `serving.kv`, `roles.states`."""
    paths = list((ROOT / "rlplan" / "memory").rglob(f"{name.replace('.', '/')}.py"))
    assert len(paths) == 1, (name, paths)
    return importlib.import_module(".".join(paths[0].relative_to(ROOT).with_suffix("").parts))


def public_names(module_name: str) -> set[str]:
    """Public functions, classes and methods that a module of formulas defines itself."""
    module = module_named(module_name)
    names = set()
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            names.add(f"{module_name}.{name}")
        elif inspect.isclass(value):
            tree = ast.parse(inspect.getsource(value)).body[0]
            assert isinstance(tree, ast.ClassDef)
            methods = [item.name for item in tree.body if isinstance(item, ast.FunctionDef)]
            names |= {f"{module_name}.{name}.{method}" for method in methods if not method.startswith("_")}
            names |= set() if methods else {f"{module_name}.{name}"}
    return names


@pytest.mark.parametrize("module", FORMULA_MODULES)
def test_every_formula_is_in_the_memory_model(module: str) -> None:
    """A function of bytes is a formula; what goes into one is documented where it is defined."""
    formulas = {name for name in public_names(module) if name.endswith("_bytes")}
    assert {name for name in formulas if f"`{name}`" not in MEMORY_PAGE} == set()


def test_every_formula_that_the_memory_model_names_exists() -> None:
    named = re.findall(rf"`({'|'.join(map(re.escape, FORMULA_MODULES))})\.([\w.]+)`", MEMORY_PAGE)
    assert len(named) > 30
    for module, path in named:
        value: Any = module_named(module)
        for name in path.split(".") if f"{module}.{path}" not in ALL_KEYS else ():
            assert hasattr(value, name), f"{module}.{path}"
            value = getattr(value, name)


EXAMPLE_JOBS = ("quickstart", "memory-bound")
NEAR_FRACTION, NEAR_MIB = 0.02, 8.0
"""Resident sizes differ a little from run to run: as far as that, a measured number may lag behind the report."""


@cache
def read_samples(job: str) -> list[dict[str, str]]:
    with (ROOT / "reports" / job / "memory.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def documented_table(name: str) -> list[list[str]]:
    text = MEASURED_PAGE.partition(f"<!-- table: {name} -->")[2].partition("<!-- end -->")[0]
    return rows(text)


def tensors_table() -> Iterator[list[str]]:
    """Bytes after an action, the largest of each kind: predicted and measured."""
    for job in EXAMPLE_JOBS:
        predicted: dict[tuple[str, str], int] = defaultdict(int)
        measured: dict[tuple[str, str], int] = defaultdict(int)
        for row in plan_example(job).ledger.rows:
            for kind, size in ((row.kind.value, row.resident_bytes), (f"{row.kind.value} (loaded)", row.loaded_bytes)):
                predicted[(row.process, kind)] = max(predicted[(row.process, kind)], size)
        for sample in read_samples(job):
            kind = sample["kind"] + (" (loaded)" if sample["statistic"] == "loaded" else "")
            key = (sample["process"], kind)
            measured[key] = max(measured[key], int(sample["measured_bytes"]))
        kinds = [name for kind in MemoryKind for name in (kind.value, f"{kind.value} (loaded)")]
        skipped = {MemoryKind.PROCESS.value, MemoryKind.FRAGMENTATION.value}
        for process in plan_example(job).ledger.processes:
            for kind in kinds:
                if kind not in skipped and (size := predicted[(process, kind)]):
                    yield [job, process, kind, f"{size:,}", f"{measured[(process, kind)]:,}"]


def working_table() -> Iterator[list[str]]:
    """Peak less resident of the memory-bound job's actions, in MiB."""
    job, ledger = "memory-bound", plan_example("memory-bound").ledger
    for run_phase, action, process in (
        ("start", "start_trainer", "policy_trainer/0"),
        ("steady", "generate", "rollout_engine/0"),
        ("steady", "score/reference", "scorer/reference/0"),
        ("steady", "train_forward_backward", "policy_trainer/0"),
        ("steady", "train_forward_backward", "policy_trainer/1"),
        ("steady", "optimizer_step", "policy_trainer/0"),
        ("steady", "optimizer_step", "policy_trainer/1"),
        ("steady", "sync_weights", "rollout_engine/0"),
        ("finish", "checkpoint", "policy_trainer/0"),
    ):
        predicted = sum(
            row.peak_bytes - row.resident_bytes
            for row in ledger.rows
            if (row.run_phase, row.action_id, row.process) == (run_phase, action, process)
            and row.kind is not MemoryKind.FRAGMENTATION
        )
        totals = [
            (sample["step"], sample["statistic"], int(sample["measured_bytes"]))
            for sample in read_samples(job)
            if sample["kind"] == "total"
            and (sample["run_phase"], sample["action_id"], sample["process"]) == (run_phase, action, process)
        ]
        resident = {step: size for step, statistic, size in totals if statistic == "resident"}
        measured = max(size - resident[step] for step, statistic, size in totals if statistic == "peak")
        yield [action, process, mib(predicted), mib(measured), format_percent(predicted / measured)]


def peaks_table() -> Iterator[list[str]]:
    """Peaks of whole processes in MiB, with and without the libraries."""
    for job in EXAMPLE_JOBS:
        report = json.loads((ROOT / "reports" / job / "report.json").read_text())
        for peak in report["memory"]["process_peaks"]:
            ledger = plan_example(job).ledger
            predicted = ledger.process_peak(peak["process"])
            libraries = sum(size for _, _, kind, size in predicted.rows if kind is MemoryKind.PROCESS)
            net = "-"
            if (peak["modelled_share"] or 0) >= 0.5:
                net = format_percent((predicted.num_bytes - libraries) / peak["net_measured_bytes"])
            error = format_percent(predicted.num_bytes / peak["measured_bytes"])
            yield [job, peak["process"], mib(predicted.num_bytes), mib(peak["measured_bytes"]), error, net]


def mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def format_percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def number(cell: str) -> float:
    return float(cell.replace(",", "").removesuffix(" %"))


def format_table(table: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def test_the_table_of_tensors_is_what_is_predicted_and_was_measured() -> None:
    fresh, documented = list(tensors_table()), documented_table("tensors")
    assert [row[:4] for row in documented] == [row[:4] for row in fresh], (
        f"write into reports/runtime/memory.md:\n{format_table(fresh)}"
    )
    for row, now in zip(documented, fresh, strict=True):
        is_exact = now[2].partition(" ")[0] in PERSISTENT_KINDS
        assert number(row[4]) == pytest.approx(number(now[4]), rel=0 if is_exact else NEAR_FRACTION, abs=0), row
        assert not is_exact or row[3] == row[4], row


@pytest.mark.parametrize(("name", "make"), [("working", working_table), ("peaks", peaks_table)])
def test_the_tables_of_peaks_are_what_is_predicted_and_was_measured(
    name: str, make: Callable[[], Iterator[list[str]]]
) -> None:
    """A row is two names, predicted, measured, the error, and perhaps the error without libraries."""
    documented, fresh = documented_table(name), list(make())
    advice = f"write into reports/runtime/memory.md:\n{format_table(fresh)}"
    assert [row[:3] for row in documented] == [row[:3] for row in fresh], advice
    for row, now in zip(documented, fresh, strict=True):
        predicted, measured, error = map(number, row[2:5])
        assert abs(measured - number(now[3])) <= max(NEAR_MIB, NEAR_FRACTION * measured), advice
        rounding = 10 * predicted / measured / min(predicted, measured)
        assert abs(error - (predicted / measured - 1) * 100) <= 0.1 + rounding, row
        assert [cell == "-" for cell in row[5:]] == [cell == "-" for cell in now[5:]], advice
