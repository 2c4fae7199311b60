"""write_report: reads a run folder and writes a folder with a page and tables.

In: a run folder, an output folder, and runs to compare. Out: the files of ReportFiles; run folders are only read.
Left out: the content of the files (summary.py, run_page.py). No output names an absolute path.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rlplan.report import dataframes, perfetto
from rlplan.report.run_page import render_page
from rlplan.report.summary import Findings, find, summarize
from rlplan.spec.base import explain_write_errors


@dataclass(frozen=True)
class ReportFiles:
    """Files of a report, all in one folder."""

    page: Path
    """The report as HTML."""
    metrics: Path
    """Metrics, one row per step, as CSV."""
    memory: Path
    """Predicted and measured memory, joined, as CSV."""
    summary: Path
    """The report as JSON."""
    trace: Path
    """Actions, memory and weight syncs, for Perfetto; absent where nothing was timed."""

    @staticmethod
    def within(folder: Path) -> "ReportFiles":
        """The file names that every report uses."""
        return ReportFiles(
            page=folder / "index.html",
            metrics=folder / "metrics.csv",
            memory=folder / "memory.csv",
            summary=folder / "report.json",
            trace=folder / "trace.json",
        )


def write_report(run_dir: Path, out_dir: Path, compare: Sequence[Path] = ()) -> ReportFiles:
    """Write the report of a run, finished or not. compare: further runs (seeds, controls) in its learning curves.

    Raises: SpecError when a folder is no run folder or holds a damaged file, or when writing fails; RunError when the
    disk is full.
    """
    findings = find(run_dir, compare)
    summary = summarize(findings)
    files = ReportFiles.within(out_dir)
    with explain_write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        dataframes.steps(findings.run).to_csv(files.metrics, index=False, lineterminator="\n")
        _memory_table(findings).to_csv(files.memory, index=False, lineterminator="\n")
        perfetto.write_trace(findings.run, files.trace)
        files.summary.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        files.page.write_text(render_page(findings, summary), encoding="utf-8")
    return files


def _memory_table(findings: Findings) -> pd.DataFrame:
    """Every sample with its prediction, rounded to the precision of our clocks."""
    return findings.joined.assign(
        error_fraction=findings.joined["error_fraction"].round(5), at_s=findings.joined["at_s"].astype(float).round(4)
    )
