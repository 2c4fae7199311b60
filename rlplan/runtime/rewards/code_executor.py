"""The code_executor reward: it runs the program in a response in a sandbox, against the row's tests.

In: a response and a row's answer (code_tests.py). Out: 1 or 0, or the fraction of tests that pass. A fault of the
sandbox or the row is a RewardFailure. A timeout or crash of the program is a wrong answer, with a note.
"""

import itertools

from rlplan.runtime.rewards.assertions.trees import UnreadableTestsError
from rlplan.runtime.rewards.code_tests import read_tests
from rlplan.runtime.rewards.verdict import ExhaustedError, RewardFailure
from rlplan.runtime.rewards.verifiers import PATTERN_TIMEOUT_S
from rlplan.runtime.rollout.experience import Prompt
from rlplan.runtime.sandbox.programs import Limits, Program, Report, Sandbox
from rlplan.spec.parts.rewards import CodeExecutorSpec


def make_limits(spec: CodeExecutorSpec) -> Limits:
    return Limits(spec.case_timeout_s, spec.timeout_s, spec.memory, spec.max_processes)


def extract_program(text: str, pattern: str) -> str | None:
    """The last program in a response, or None. Raises: ExhaustedError when the pattern takes too long."""
    import regex  # a dry run does not need it

    try:
        matches = regex.findall(pattern, text, flags=regex.DOTALL, timeout=PATTERN_TIMEOUT_S, concurrent=True)
    except TimeoutError:
        raise ExhaustedError("timeout") from None
    if not matches:
        return None
    return str(matches[-1][0] if isinstance(matches[-1], tuple) else matches[-1])


def grade_program(spec: CodeExecutorSpec, text: str, prompt: Prompt, sandbox: Sandbox) -> tuple[float, str]:
    """(reward from 0 to 1, note why the program did not pass; empty when it passed).

    Raises: RewardFailure, ExhaustedError.
    """
    try:
        checks = read_tests(prompt.answer)
    except UnreadableTestsError as error:
        raise RewardFailure(f"the row's tests: {error}") from None
    source = extract_program(text, spec.pattern)
    # Python cannot compile a source with null bytes or lone surrogates.
    if source is None or "\0" in source or not _is_text(source):
        return 0.0, "no_program"
    source = spec.template.replace("{prompt}", prompt.text).replace("{program}", source)
    program = Program(source, tuple(case for check in checks for case in check.cases), make_limits(spec))
    report = sandbox.run(program, stops_early=spec.credit == "all")
    if report.status == "broken":
        raise RewardFailure(f"the sandbox: {report.detail}")
    results = iter(report.cases)
    num_right = sum(check.holds(tuple(itertools.islice(results, len(check.cases)))) for check in checks)
    value = num_right / len(checks) if spec.credit == "fraction" else float(num_right == len(checks))
    return value, "" if value == 1.0 else _find_note(report)


def _find_note(report: Report) -> str:
    if report.status != "done":
        return report.status
    bad = [result.status for result in report.cases if result.status not in ("ok", "missing")]
    return bad[0] if bad else "wrong"


def _is_text(source: str) -> bool:
    try:
        source.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
