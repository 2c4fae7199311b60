"""Regenerates "Results by slice" in reports/trust/README.md: all slices of faults and hostile inputs, with outcomes.

In: logs of `pytest -v`, or JUnit files. Out: a table of the slices, the cases that failed, and the seconds of each
fault that a log prints; the rest of the page stays. `python -m benchmarks.trust_evidence LOG...`; a test that is in
several logs counts as in the last of them, so that a log of repeated tests follows that of the whole night.
"""

import re
import statistics
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.texts import format_table, read_texts
from rlplan.spec.files.yaml import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "reports" / "trust" / "README.md"
TITLE = "## Results by slice\n"
SLICES: dict[str, list[str]] = read_yaml(Path(__file__).with_suffix(".yaml"), "the slices")
"""Kinds of faults and inputs, each with the beginnings of the names of its tests."""
OUTCOMES = ("passed", "failed", "skipped")
_WORD = "(PASSED|FAILED|ERROR|SKIPPED)"
_LINE = re.compile(rf"(?:\[gw\d+\] \[ *\d+%\] )?(?:{_WORD} )?(tests/\S+\.py::.+?)(?: {_WORD}\b.*)?\s*")
"""A result in a log, with and without processes side by side."""
_FAULT = re.compile(
    r"^Outcome\(fault=Fault\(victim='([^']+)', point='[^']+', kind='([^']+)', mode='([^']+)', step=\d+\), "
    r"ending='([^']+)', noticed_s=([\d.]+|None), recovered_s=([\d.]+|None)"
)
"""An outcome as tests/trust/faults/fault_matrix.py prints it."""


def main() -> int:
    """Write the page from the logs that the command line names."""
    logs = [Path(name).read_text("utf-8", errors="replace") for name in sys.argv[1:]]
    results: dict[str, str] = {}
    for log in logs:
        results |= read_results(log)
    before, _, rest = PAGE.read_text("utf-8").partition(TITLE)
    _, heading, after = rest.partition("\n## ")
    section = write_section(results, [fault for log in logs for fault in read_faults(log)])
    PAGE.write_text(before + TITLE + section + heading + after, encoding="utf-8")
    return 0


def read_results(log: str) -> dict[str, str]:
    """The outcome of each test of a log by its name. log: text of `pytest -v`, or a JUnit file."""
    if log.lstrip().startswith("<"):
        return dict(map(_read_case, ET.fromstring(log).iter("testcase")))
    results = {}
    for line in log.splitlines():
        if (match := _LINE.fullmatch(line)) and (word := match[1] or match[3]):
            results[match[2].strip()] = "failed" if word == "ERROR" else word.lower()
    return results


def _read_case(case: ET.Element) -> tuple[str, str]:
    file = f"{case.get('classname', '').replace('.', '/')}.py"
    kinds = {child.tag for child in case}
    outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return f"{file}::{case.get('name', '')}", outcome


Fault = tuple[str, str, str, float, float]
"""Process, kind of run, what followed, seconds until it was noticed, seconds until it had recovered."""


def read_faults(log: str) -> Iterator[Fault]:
    """The faults that a log prints, but for those that nothing had to notice."""
    for line in log.splitlines():
        if (match := _FAULT.match(line)) and match[5] != "None" and match[6] != "None":
            victim, kind, mode, ending = match.groups()[:4]
            process = f"{victim}, {'stopped' if kind == 'SIGSTOP' else 'ended'}"
            yield process, mode, ending, float(match[5]), float(match[6])


def write_section(results: dict[str, str], faults: list[Fault]) -> str:
    """The section as Markdown."""
    texts = read_texts(__file__)
    failed = sorted(name for name, outcome in results.items() if outcome == "failed" and _find_slice(name))
    failures = "\n".join(f"- `{name}`" for name in failed)
    return (
        texts["section"]
        .format(
            slices=format_table(("tried", "tests", "cases", "outcome"), _list_slices(results)),
            failures=texts["failures"].format(failures=failures) if failed else "",
            faults=texts["faults"].format(faults=_format_faults(faults)) if faults else "",
        )
        .rstrip()
        + "\n"
    )


def _find_slice(name: str) -> str:
    return next((title for title, tests in SLICES.items() if name.startswith(tuple(tests))), "")


def _list_slices(results: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for title, tests in SLICES.items():
        counts = Counter(outcome for name, outcome in results.items() if name.startswith(tuple(tests)))
        outcome = ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES if counts[kind])
        yield title, ", ".join(f"`{test}`" for test in tests), str(counts.total()), outcome or "not in these logs"


def _format_faults(faults: Iterable[Fault]) -> str:
    groups = defaultdict[tuple[str, str, str], list[tuple[float, float]]](list)
    for process, mode, ending, noticed_s, recovered_s in faults:
        groups[process, mode, ending].append((noticed_s, recovered_s))
    rows = [
        (
            *key,
            str(len(times)),
            *(f"{statistics.median(column):.1f} and {max(column):.1f}" for column in zip(*times, strict=True)),
        )
        for key, times in sorted(groups.items())
    ]
    return format_table(("process", "run", "what followed", "faults", "noticed after, s", "recovered after, s"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
