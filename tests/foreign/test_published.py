"""Published configurations, by their facts: read without a change, answered, and what upstream runs fits."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlplan.foreign.check import Asked, import_job
from rlplan.foreign.source import read_source
from rlplan.foreign.table import SOURCES, load_table
from rlplan.planner.machine import open_search
from rlplan.planner.plan_parts import Verdict
from rlplan.spec.files.yaml import read_yaml
from tests.factories import ROOT
from tests.foreign.scripts import write_script, write_yaml

FOLDER = Path(__file__).parent / "published"
LEAST_SHARE = 0.9
"""Least share of configurations that fit, among those that upstream says run."""
LEAST_NUMBER = 10


YAML = ("nemo_rl", "trl")
"""Stacks whose facts are written as a file."""


def entries() -> list[tuple[str, dict[str, Any]]]:
    entries = []
    for source in SOURCES:
        path = FOLDER / f"{source}.yaml"
        entries += [(source, entry) for entry in read_yaml(path, "published facts")] if path.exists() else []
    return entries


ENTRIES = entries()
IDS = [f"{source}-{Path(entry['file']).stem}" for source, entry in ENTRIES]


@cache
def find_verdict(index: int, folder: Path) -> tuple[Verdict, str]:
    """The verdict on one configuration with its task's usual lengths, and what is too small."""
    source, entry = ENTRIES[index]
    table = load_table(source)
    settings = entry["settings"]
    if table.syntax == "flags":
        settings = {f"--{key}": value for key, value in settings.items()}
    if source not in YAML:
        script = write_script(folder, f"python3 -m {table.entries[0]}", settings, preset=entry.get("preset", ""))
    else:
        script = write_yaml(folder, settings)
    lengths: tuple[str, ...] = ()
    if "lengths" in entry:
        prompt, response = entry["lengths"]
        constant = f"workload.response_lengths={{kind: constant, value: {response}}}"
        lengths = (f"workload.mean_prompt_len={prompt}", constant)
    _, job = import_job(read_source(script, source), Asked(entry["hardware"], entry.get("model"), lengths))
    plan = open_search(job).run(with_others=False)
    short = plan.shortage
    return plan.fit, "" if short is None else f"{short.of}, in {short.peak.action_id}"


@pytest.mark.parametrize("index", range(len(ENTRIES)), ids=IDS)
def test_a_published_configuration_is_read_and_answered(index: int, tmp_path: Path) -> None:
    verdict, reason = find_verdict(index, tmp_path)
    expected = ENTRIES[index][1].get("verdict", "fits")
    assert verdict.value.partition(" in ")[0] == expected, reason


def test_what_upstream_says_runs_fits() -> None:
    runs = [entry for _, entry in ENTRIES if entry.get("runs", True)]
    fits = [run for run in runs if "verdict" not in run]
    assert len(runs) >= LEAST_NUMBER
    assert len(fits) / len(runs) >= LEAST_SHARE
    page = (ROOT / "docs" / "import.md").read_text("utf-8")
    assert f"Of {len(runs)} published configurations that upstream runs, {len(fits)} fit" in page
