"""Answers of rlplan to settings that people reported, graded by what their threads say.

In: cases with their reported facts. Out: a grade per case: right, partly, wrong or unread.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.foreign.check import Asked, Checked, check, import_job
from rlplan.foreign.logs.read import read_log
from rlplan.foreign.source import read_source
from rlplan.planner.answers.measured_step import explain_step
from rlplan.planner.answers.plan_results import sum_phase_costs
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.planner.serving import Served
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.job import JobSpec
from rlplan.units import GIB
from rlplan.vocabulary import MemoryKind, Phase
from tests.foreign.scripts import verl_script, write_script

REPORTS = Path(__file__).parent / "reports"
PROGRAMS = {"openrlhf": "python3 -m openrlhf.cli.train_ppo_ray", "vllm": "vllm serve", "trl": "trl grpo"}
SLOWEST, FASTEST = 1.77, 0.6
"""Measured over predicted seconds of nine of ten steps."""
CLOSE = 0.1
"""Largest relative error of bytes that count as predicted."""
EXPECTED, UNSURE = "in expectation", "host may run out"
"""A plan that fits in expectation only, and one that fits although its host may run out of memory."""
STATIC = (MemoryKind.WEIGHTS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER, MemoryKind.MASTER_WEIGHTS)


def list_cases() -> list[dict[str, Any]]:
    cases = read_yaml(REPORTS / "outcomes.yaml", "the outcomes")["cases"]
    by_id = {case["id"]: case for case in cases}
    return [by_id.get(case.get("like"), {}) | case for case in cases]


@dataclass
class Answer:
    """The answer of rlplan to a case."""

    plan: Plan | None = None
    served: Served | None = None
    remedies: tuple[str, ...] = ()
    refusal: str = ""
    verdicts: list[str] | None = None
    """The verdict on a log."""


def ask(case: dict[str, Any], folder: Path) -> Answer:
    """Ask as the author of the thread would. Raises: SpecError for a stack that is not read."""
    if "log" in case:
        report = explain_step(_read_job(case), read_log(REPORTS / str(case["log"])))
        return Answer(verdicts=["normal" if report.is_normal and not report.causes else "slow"])
    if "job" in case:
        return _answer_job(case)
    hardware, overrides = case["hardware"], tuple(case.get("overrides", ()))
    settings = read_source(_write(case, folder), None, tuple(case.get("set", ())))
    return _take_checked(check(settings, Asked(hardware, case.get("model"), overrides)))


def _read_job(case: dict[str, Any]) -> JobSpec:
    overrides = tuple(case.get("overrides", ()))
    if "file" in case:
        source = read_source(REPORTS / str(case["file"]), None, tuple(case.get("set", ())))
        return import_job(source, Asked(case["hardware"], None, overrides))[1]
    job = case["job"]
    return load_job(REPORTS / job, overrides) if isinstance(job, str) else job_from(job, overrides)


def _answer_job(case: dict[str, Any]) -> Answer:
    try:
        plan = find_best_plan(_read_job(case), with_others=False)
    except NoFeasiblePlanError as error:
        return Answer(refusal=error.what)
    return Answer(plan, remedies=tuple(remedy.change for remedy in plan.remedies))


def _take_checked(checked: Checked) -> Answer:
    remedies = tuple(" ".join(f"{key}={value}" for key, value in change.values.items()) for change in checked.changes)
    plan = checked.elsewhere.plan if checked.elsewhere is not None else checked.plan
    return Answer(plan, checked.served, remedies, "" if checked.refusal is None else checked.refusal.what)


def _write(case: dict[str, Any], folder: Path) -> Path:
    if "file" in case:
        return REPORTS / str(case["file"])
    if "python" in case:
        (folder / "train.py").write_text(case["python"])
        return folder / "train.py"
    if "verl" in case:
        return verl_script(folder, case["verl"])
    stack = next(name for name in PROGRAMS if name in case)
    flags = dict(case[stack])
    program = f"{PROGRAMS[stack]} {flags.pop('model')}" if stack == "vllm" else PROGRAMS[stack]
    return write_script(folder, program, {f"--{key}": value for key, value in flags.items()})


def grade(case: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any]]:
    """The grade of a case, and what rlplan says of each reported fact."""
    try:
        answer = ask(case, folder)
    except SpecError as error:
        return "unread", {"error": error.what}
    reported = case["reported"]
    facts = {name: _judge(name, value, answer) for name, value in reported.items()}
    words = {name: described for name, (_, described) in facts.items()}
    if "verdict" in facts and not facts["verdict"][0]:
        return "wrong", words
    holds = [is_true for is_true, _ in facts.values()]
    is_sure = UNSURE not in words.get("verdict", ()) and (
        reported.get("verdict") != "fits" or EXPECTED not in words["verdict"]
    )
    if all(holds) and is_sure:
        return "right", words
    return ("partly" if any(holds) else "wrong"), words


def _judge(name: str, value: Any, answer: Answer) -> tuple[bool, Any]:
    """Whether one reported fact is predicted, and the prediction."""
    if name == "remedy":
        return any(value in remedy for remedy in answer.remedies), answer.remedies
    if name == "verdict":
        verdicts = _name_verdicts(answer)
        # what fits in expectation only exits with 1, as what does not fit
        is_oom = value == "oom" and bool({"short", EXPECTED} & set(verdicts))
        return is_oom or bool({value, EXPECTED, UNSURE} & set(verdicts)), verdicts
    plan, served = answer.plan, answer.served
    if served is not None:
        size = served.memory.kv_cache if name == "kv_gib" else served.needed
        return abs(size / GIB / value - 1) <= CLOSE, round(size / GIB, 2)
    if plan is None:
        return False, answer.refusal
    if name == "phase":
        return value in plan.binding.action_id or value in plan.binding.run_phase, plan.binding.action_id
    if name.endswith("_s"):
        seconds = plan.seconds if name == "step_s" else sum_phase_costs(plan.timing.step)[Phase.SYNC].seconds  # type: ignore[union-attr]
        return FASTEST <= value / seconds <= SLOWEST, round(seconds, 1)
    size = _measure(name, plan)
    return abs(size / GIB / value - 1) <= CLOSE, round(size / GIB, 1)


def _measure(name: str, plan: Plan) -> int:
    if name == "host_gib":
        return max(plan.ledger.host_peak(host).num_bytes for host in plan.ledger.hosts)
    if name == "static_gib":
        sizes: dict[str, int] = {}
        for row in plan.ledger.rows:
            if row.process.startswith("policy_trainer") and row.space == "device" and row.kind in STATIC:
                sizes[row.action_id] = sizes.get(row.action_id, 0) + row.peak_bytes * (row.run_phase == "steady")
        return max(sizes.values())
    return plan.binding.num_bytes


def _name_verdicts(answer: Answer) -> list[str]:
    """Everything that is too small: a GPU, a host, an engine's KV cache; `fits` if nothing is."""
    if answer.verdicts is not None:
        return answer.verdicts
    if answer.served is not None:
        return ["fits" if answer.served.fits else "short"]
    if answer.plan is None:
        return ["oom"]
    if answer.plan.fit is Verdict.IN_EXPECTATION:
        return [EXPECTED]
    if answer.plan.memory_fits:
        return [UNSURE if any("may run out" in note for note in answer.plan.notes) else "fits"]
    shortages = answer.plan.shortages
    return ["host" if short.is_of_host else "short" if "KV cache" in short.of else "oom" for short in shortages]
