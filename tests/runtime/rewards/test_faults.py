"""Rewards that go wrong: each is a failure with a reason, none is a silent 0, and a hang costs its timeout."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlplan.errors import RunError, SpecError
from rlplan.runtime.processes import line_process, machine_speed
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.rewards.judge import Judge, Response
from rlplan.runtime.rewards.reward_pool import RewardPool, list_failures
from rlplan.runtime.rewards.verdict import Verdict
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.spec.parts.rewards import AnswerMatcherSpec, FunctionSpec
from rlplan.units import MIB
from tests.factories import make_job
from tests.repository.at_night import mark_nightly
from tests.waiting import limit_time, own_processes, wait_until

FAULTY = Path(__file__).with_name("faulty.py")
TIMEOUT_S, HANG_S = 2.0, 0.5
FAULTS = {
    "nan": "it returned nan",
    "infinite": "it returned inf",
    "minus_infinite": "it returned -inf",
    "nothing": "NoneType",
    "raises": "KeyError: 'ground truth'",
    "exits": "SystemExit",
    "dies": "ended with exit code 0",
    "crashes": "ended by signal 11",
    "hangs": "timeout",
    "hangs_and_swallows": "timeout",
    "too_many": "2 values for 1",
    "too_few": "0 values for 1",
    "text": "it returned str",
    "huge_result": "it returned str",
    "huge_number": "OverflowError",
    "prints_without_end": "it returned nan",
    "takes_all_memory": "MemoryError",
    "leaves_threads": "with threads at work",
    "tower": "timeout",
}


def function(name: str) -> FunctionSpec:
    timeout_s = HANG_S if FAULTS.get(name) == "timeout" else scale_seconds(TIMEOUT_S)
    return FunctionSpec(kind="function", path=f"{FAULTY}:{name}", timeout_s=timeout_s, memory=512 * MIB)


@pytest.fixture(scope="module")
def mathematics() -> Iterator[Judge]:
    """One process for all that is compared as mathematics: sympy takes longer to import than to compare."""
    judge = Judge((MATH,), None)
    yield judge
    judge.close()


def judge_text(judge: Judge, text: str, answer: str = "12") -> Verdict:
    return judge.judge(Response(Prompt("1", "p", answer, (1,)), text))


def judge_once(*specs: FunctionSpec | AnswerMatcherSpec, text: str = "12", answer: str = "12") -> Verdict:
    judge = Judge(specs, None)
    try:
        judge.start()
        return judge.judge(Response(Prompt("1", "p", answer, (1,), '{"data_source": "x"}'), text))
    finally:
        judge.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_failure_with_its_reason(name: str) -> None:
    spec = function(name)
    judge = Judge((spec,), None)
    judge.start()
    try:
        with limit_time(1.0, beyond_s=spec.timeout_s):
            verdict = judge.judge(Response(Prompt("1", "p", "12", (1,)), "12"))
        assert verdict.values == {}
        assert FAULTS[name] in verdict.failure
        assert verdict.failure.startswith("function: ")
    finally:
        judge.close()


def test_at_least_14_kinds_of_faults_are_tried() -> None:
    assert len(FAULTS) >= 14


def test_after_a_hang_the_next_response_is_judged_and_nothing_is_left() -> None:
    before = own_processes().keys()
    spec = function("hangs").model_copy(update={"timeout_s": 0.3})
    judge = Judge((spec, function("good").model_copy(update={"name": "good"})), None)
    response = Response(Prompt("1", "p", "12", (1,)), "12")
    assert judge.judge(response).failure == "function: timeout after 0.3 s"
    assert judge.judge(response).failure == "function: timeout after 0.3 s"
    judge.close()
    assert own_processes().keys() <= before


JUDGE_A_TOWER = """
import sys
from rlplan.runtime.rewards.processes import RewardProcess
process = RewardProcess("tower", {"kind": "function", "path": sys.argv[1], "signature": "auto", "memory": 1 << 30}, 60)
process.start()
print(process._process.pid, flush=True)
process.ask_batch([{"prompt": "p", "chat": None, "text": "12", "tokens": [1], "answer": "12", "columns": {}}])
"""


def test_a_reward_that_hangs_does_not_outlive_a_run_that_is_killed() -> None:
    """It computes and never reads that there is nothing more to judge."""
    command = [sys.executable, "-c", JUDGE_A_TOWER, f"{FAULTY}:tower"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        reward = psutil.Process(int(run.stdout.readline()))
        time.sleep(0.5)
        assert reward.is_running()
        run.kill()
    assert psutil.wait_procs([reward], timeout=scale_seconds(5))[1] == []


@pytest.mark.parametrize(("name", "value"), [("good", 1.0), ("good_as_verl", 1.0), ("tensor", 0.5)])
def test_good_functions_of_both_signatures_give_their_numbers(name: str, value: float) -> None:
    assert judge_once(function(name)).values == {"function": value}


def test_a_wrong_signature_is_said_before_anything_runs() -> None:
    with pytest.raises(SpecError, match=r"it takes \(question, reply\), which is neither"):
        judge_once(function("wrong_signature"))
    with pytest.raises(SpecError, match="has no function absent"):
        judge_once(function("absent"))


REFUSED = {
    ("trl", "wrong_signature"): "it takes (question, reply), but not completion_ids or completions",
    ("verl", "wrong_signature"): "it takes (question, reply), but not solution_str",
    ("trl", "takes_no_parameters"): "it takes ()",
    ("verl", "takes_no_parameters"): "it takes ()",
    ("auto", "verl_with_more"): "missing a required argument: 'needed'",
    ("auto", "asks_for_a_column"): "missing a required argument: 'level'; the arguments are prompts, completions",
    ("auto", "takes_positions"): "completion_ids, trainer_state, log_extra, log_metric, answer, hint",
    ("auto", "generates"): "generates is a class or a generator",
    ("auto", "Built"): "Built is a class or a generator",
}


@pytest.mark.parametrize(("signature", "name"), REFUSED)
def test_a_function_that_no_call_fits_is_said_before_anything_runs(signature: str, name: str) -> None:
    judge = Judge((function(name).model_copy(update={"signature": signature}),), None)
    try:
        with pytest.raises(SpecError) as caught:
            judge.start(columns={"answer", "hint"})
    finally:
        judge.close()
    assert REFUSED[signature, name] in caught.value.what


def test_a_function_is_given_the_columns_that_it_asks_for_and_no_more() -> None:
    judge = Judge((function("asks_for_a_column"), function("short_verl").model_copy(update={"name": "verl"})), None)
    try:
        judge.start(columns={"answer", "level"})
        columns = '{"level": 3, "completions": "a column of the data"}'
        verdict = judge.judge(Response(Prompt("1", "p", "12", (1,), columns), "12"))
    finally:
        judge.close()
    assert verdict.values == {"function": 3.0, "verl": 1.0}


def test_a_function_that_hangs_while_it_is_imported_is_told_with_the_deadline_that_a_slow_machine_lengthened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_process, "START_S", 0.5)
    monkeypatch.setattr(machine_speed, "_last", (time.monotonic(), 4.0))
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    spec = FunctionSpec(kind="function", path=f"{tmp_path / 'hangs.py'}:f", timeout_s=1.0)
    with pytest.raises(SpecError, match="timeout after 2 s while it started"):
        judge_once(spec)


MATH = AnswerMatcherSpec(kind="answer_matcher", pattern="(.*)", compares="math", timeout_s=scale_seconds(3.0))


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [(r"\frac{1}{2}", "0.5", 1.0), ("0.5", r"\frac{1}{2}", 1.0), ("1/3", "0.5", 0.0), ("(x+1)^2", "x^2+2x+1", 1.0)],
)
def test_mathematics_is_compared_by_what_it_means(mathematics: Judge, text: str, answer: str, value: float) -> None:
    assert judge_text(mathematics, text, answer).values == {"answer_matcher": value}


HEDGES = (
    "11 or 12", "11, 12, 13", r"\{11, 12\}", "1 2 3 4 5 6 7 8 9 10 11 12 13", "$11$ or $12$ or $13$",
    r"\boxed{11}, \boxed{12}, \boxed{13}", r"10 \vee 12 \vee 13", r"10 \land 12 \land 13", "10 | 12 | 13", "(0, 20)",
    "[12, 13]", "x = 12 or x = 13", "11 = 12 = 13", r"12 \ne 13", "-12", "11 < x < 13", "x^2 - 23x + 132 = 0", "x", "",
)  # fmt: skip
"""Responses that name more than one number, or none: 12 would be right."""


def test_several_answers_are_no_answer(mathematics: Judge) -> None:
    verdicts = {text: judge_text(mathematics, text) for text in HEDGES}
    assert {text: verdict.values for text, verdict in verdicts.items() if verdict.values["answer_matcher"]} == {}


FRAMES = ("{}", "${}$", r"\text{{{}}}", r"\operatorname{{{}}}(1)", r"\frac{{{}}}{{2}}")
CODE_IN_MATHEMATICS = ("__import__('os').system('touch {}')", "open('{}', 'w').write('x')", "exec(\"open('{}', 'w')\")")


@pytest.mark.parametrize("frame", mark_nightly(FRAMES, but=("{}", r"\text{{{}}}")))
def test_code_in_a_mathematical_answer_does_nothing(mathematics: Judge, tmp_path: Path, frame: str) -> None:
    for code in CODE_IN_MATHEMATICS:
        verdict = judge_text(mathematics, frame.format(code.format(tmp_path / "touched")))
        assert verdict.failure or verdict.values == {"answer_matcher": 0.0}, "code is not run, and is never right"
    assert list(tmp_path.iterdir()) == []


TOWERS = ("9^{9^{9^{9}}}", *(pytest.param(text, marks=pytest.mark.nightly) for text in ("10^{10^{10}}", "9^{9**9}")))


@pytest.mark.parametrize("text", TOWERS)
def test_towers_cost_their_timeout_one_after_the_other_and_are_a_zero_that_is_noted(text: str) -> None:
    judge = Judge((MATH.model_copy(update={"timeout_s": TIMEOUT_S}),), None)
    try:
        judge.start()
        for _ in range(2):
            with limit_time(1.0, beyond_s=TIMEOUT_S):
                verdict = judge.judge(Response(Prompt("1", "p", "12", (1,)), text))
            assert (verdict.values, verdict.failure) == ({"answer_matcher": 0.0}, "")
            assert set(verdict.notes) <= {"answer_matcher/timeout", "answer_matcher/memory"}
            assert verdict.notes
    finally:
        judge.close()


def test_a_row_whose_own_answer_takes_too_long_is_a_failure_and_no_zero() -> None:
    verdict = judge_once(MATH.model_copy(update={"timeout_s": TIMEOUT_S}), text="1", answer=TOWERS[0])
    assert (verdict.values, verdict.notes) == ({}, {})
    assert verdict.failure.startswith("answer_matcher: ")


def test_many_responses_that_exhaust_their_limits_are_an_alarm() -> None:
    reward_pool = RewardPool(make_job(rewards=[{"kind": "function", "path": f"{FAULTY}:good"}]))
    try:
        assert reward_pool.describe_exhaustion(Counter({"code/timeout": 2, "code/wrong": 60}), 64) is None
        text = reward_pool.describe_exhaustion(Counter({"code/timeout": 5, "math/memory": 2, "code/wrong": 50}), 64)
    finally:
        reward_pool.close()
    expected = "7 of 64 responses have the reward 0 for exhausting their limits (5 code/timeout, 2 math/memory)"
    assert text == expected


def test_what_is_no_mathematics_is_wrong_and_noted(mathematics: Judge) -> None:
    for text, note in {r"\frac{": "unreadable", "9**9**9**9": "unreadable", "1" * 5000: "too_long"}.items():
        verdict = judge_text(mathematics, text)
        assert (verdict.values, verdict.notes) == ({"answer_matcher": 0.0}, {f"answer_matcher/{note}": 1}), text


def test_python_s_power_is_a_power(mathematics: Judge) -> None:
    assert judge_text(mathematics, "2**3", "8").values == {"answer_matcher": 1.0}
    assert judge_text(mathematics, "2**3", "2").values == {"answer_matcher": 0.0}


@pytest.mark.parametrize("name", ["good", "raises"])
def test_an_empty_response_is_judged_as_any_other(name: str) -> None:
    reward_pool = RewardPool(make_job(rewards=[{"kind": "function", "path": f"{FAULTY}:{name}"}]))
    empty = Rollout(Prompt("1", "p", "12", (1,)), 0, Completion((), (), "stop"), "", id="generate/0/0")
    try:
        reward_pool.judge([empty])
    finally:
        reward_pool.close()
    assert (empty.reward, empty.has_failed) == (0.0, name == "raises")


def rollout(group: int, failure: str = "", number: int = 0) -> Rollout:
    completion = Completion((5, 6), (-0.1, -0.2), "stop")
    return Rollout(Prompt("1", "p", "12", (1,)), group, completion, "12", id=f"g/{group}/{number}", failure=failure)


def test_more_failures_than_the_job_lets_pass_end_the_run() -> None:
    spec = {"kind": "function", "path": f"{FAULTY}:raises"}
    reward_pool = RewardPool(make_job(rewards=[spec], **{"limits.max_failed_rewards": 0.5}))
    rollouts = [rollout(0, number=number) for number in range(4)]
    try:
        reward_pool.judge(rollouts)
    finally:
        reward_pool.close()
    assert [each.reward for each in rollouts] == [0.0] * 4
    assert len(list_failures(rollouts, 3)) == 4
    with pytest.raises(RunError, match="4 of 4 rollouts have no reward; 4 because of function: KeyError"):
        reward_pool.check_failures(rollouts, 3)
    reward_pool.check_failures([*rollouts[:2], rollout(1), rollout(1)], 3)


def test_responses_are_judged_before_they_are_asked_for() -> None:
    spec = {"kind": "function", "path": f"{FAULTY}:good_as_verl"}
    reward_pool = RewardPool(make_job(rewards=[spec]))
    try:
        reward_pool.start()
        each = rollout(0)
        reward_pool.begin(each.id, Response(each.prompt, each.text))
        wait_until(reward_pool._started[each.id][1].done, 5, pause_s=0.01)
        asked = time.time()
        reward_pool.judge([each])
        assert each.reward == 1.0
        reward_pool.judge([each])  # once more, as where groups may be replaced: there is nothing left to judge
        span = reward_pool.take_span()
        assert span is not None
        assert span[1] <= asked
        assert reward_pool.take_span() is None
    finally:
        reward_pool.close()
