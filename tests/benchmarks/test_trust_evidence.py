"""The table of slices in reports/trust is what logs of pytest say, in each of the forms that pytest writes."""

import pytest

from benchmarks.trust_evidence import SLICES, read_faults, read_results, write_section
from tests.factories import ROOT

NAME = "tests/trust/faults/test_ends.py::test_a_clock_that_jumps_ends_no_run[86400.0]"
OTHER = "tests/trust/test_hostile_files.py::test_every_hostile_script_is_answered_within_2_s[yaml: deep lists]"
ALONE = f"{NAME} PASSED [ 50%]\n{OTHER} FAILED [100%]\n"
SIDE_BY_SIDE = f"{NAME} \n{OTHER} \n[gw0] [ 50%] PASSED {NAME} \n[gw1] [100%] FAILED {OTHER} \n"
JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.trust.faults.test_ends" name="test_a_clock_that_jumps_ends_no_run[86400.0]" />
<testcase classname="tests.trust.test_hostile_files"
 name="test_every_hostile_script_is_answered_within_2_s[yaml: deep lists]"><failure /></testcase>
</testsuite></testsuites>"""
FAULT = (
    "Outcome(fault=Fault(victim='gcs', point='save', kind='SIGSTOP', mode='colocated', step=4), ending='went back', "
    "noticed_s=1.25, recovered_s=40.5, message='x')\n"
)


@pytest.mark.parametrize("log", [ALONE, SIDE_BY_SIDE, JUNIT], ids=["alone", "side by side", "JUnit"])
def test_outcomes_are_read_from_every_form_of_a_log(log: str) -> None:
    assert read_results(log) == {NAME: "passed", OTHER: "failed"}


def test_the_section_counts_cases_names_failures_and_lists_seconds() -> None:
    section = write_section(read_results(ALONE), [*read_faults(FAULT)])
    assert (
        "| clock jumps of a day | `tests/trust/faults/test_ends.py::test_a_clock_that_jumps` | 1 | 1 passed |"
        in section
    )
    assert "| 1 | 1 failed |" in section
    assert f"- `{OTHER}`" in section
    assert "| gcs, stopped | colocated | went back | 1 | 1.2 and 1.2 | 40.5 and 40.5 |" in section


def test_every_slice_names_tests_that_exist() -> None:
    for test in (test for tests in SLICES.values() for test in tests):
        file, _, function = test.partition("::")
        assert f"def {function or 'test_'}" in (ROOT / file).read_text(), test
