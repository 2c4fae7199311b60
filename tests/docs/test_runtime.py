"""docs/runtime.md and docs/runtime/: every exit code, metric, file, field, action and process."""

import importlib
import inspect
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from rlplan import errors
from rlplan.emit.bundle import write_bundle
from rlplan.runtime.learning.logprob_mismatch import LIMITS
from rlplan.runtime.measure.step_metrics import StepMetrics
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.trace import MemorySample, Span
from rlplan.vocabulary import Dtype, Role
from tests.docs.documentation import DOCS, ROOT, plan_example, read, rows, section, words

RUNTIME_PAGES = "\n".join(read(path) for path in (DOCS / "runtime.md", *sorted((DOCS / "runtime").glob("*.md"))))


def test_every_exit_code_is_documented_with_its_error() -> None:
    table = [(int(row[0]), words(row[1])) for row in rows(section(RUNTIME_PAGES, "Exit codes"))]
    raised = {
        (value.exit_code, (value.__name__,))
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.RlplanError) and value is not errors.RlplanError
    }
    raised |= {(129, ("InterruptedRunError",)), (143, ("InterruptedRunError",)), (errors.EXIT_BUG, ())}
    documented = {(code, tuple(names)) for code, names in table}
    assert raised <= documented
    assert {pair for pair in documented if pair[1]} <= raised
    returned = {
        int(code)
        for code in re.findall(r"return (\d+)\n", inspect.getsource(importlib.import_module("rlplan_cli.app")))
    }
    assert returned - {code for code, _ in table} == set()


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    learning, timings = collected_rows()
    player = importlib.import_module("rlplan.runtime.driver.player")
    timings |= set(re.findall(r'timings\["([^"]+)"\]', inspect.getsource(player)))
    timings = {re.sub(r"^seconds/.*", "seconds/<action>", name) for name in timings}
    assert {name for row in rows(section(RUNTIME_PAGES, "Metrics")) for name in words(row[0])} == learning
    assert {words(row[0])[0] for row in rows(section(RUNTIME_PAGES, "Timings"))} == timings


def collected_rows() -> tuple[set[str], set[str]]:
    """Names in the rows of a step in which everything happens, made by the code that makes them in a run."""
    environment = plan_example("multi-turn").job.rollout.environment
    game = {"environment": environment.model_copy(update={"agent": ("true",)})}  # an agent has all metrics of turns
    job = plan_example("quickstart").job
    refilled = job.model_copy(update={"algorithm": job.algorithm.model_copy(update={"max_refills": 1})})
    half = job.training.model_copy(update={"dtype": Dtype.FLOAT16})
    job = job.model_copy(update={"rollout": job.rollout.model_copy(update=game), "training": half})
    metrics = StepMetrics(job)
    metrics.job = refilled  # an environment tells too late which groups have variance
    metrics.add_replaced(1)
    metrics.job = job
    prompt = Prompt("1", "Sort: 21345", "12345", (1, 2))
    rollout = Rollout(
        prompt,
        0,
        Completion((3, 4), (-0.1, -0.2), "stop", calls=("ok",)),
        rewards={**{spec.kind: 1.0 for spec in job.rewards}, "reward_model": 0.5, "environment": 1.0},
    )
    with metrics.timing("generate"):
        metrics.add_rollouts([rollout])
    metrics.add_staleness([rollout], 1)
    metrics.add_begun_anew(1)
    metrics.add_rewards([rollout])
    sums = (
        "num_tokens",
        "loss",
        "entropy_sum",
        "is_clipped_sum",
        *(f"logprob_difference_{what}" for what in ("sum", "count", "max", "kl_sum")),
        "ratio_max",
        "kl_sum",
        "importance_squared_sum",
        "teacher_reverse_kl_sum",
        *(
            f"{name}_{what}"
            for name in ("importance", "is_corrected", "is_masked", "is_ranked_right", "margin")
            for what in ("sum", "count")
        ),
    )
    metrics.add_training([dict.fromkeys((*sums, "kl_max"), 1.0)], is_first=True)
    optimizer_step = {"grad_norm": 1.0, "is_clipped": 0.0, "learning_rate": 1e-6}
    metrics.add_optimizer_step(optimizer_step)
    metrics.add_value_training([defaultdict(float, num_tokens=1.0)])
    metrics.add_optimizer_step(optimizer_step, Role.VALUE)
    metrics.add_cut_sequences(0, 1)
    metrics.add_evaluation([rollout])
    learning, timings = metrics.take_rows(1)
    return set(learning), set(timings)


def test_the_limits_of_log_prob_differences_are_documented_as_they_are() -> None:
    documented = {words(row[0])[0]: row[1:] for row in rows(section(RUNTIME_PAGES, "Weight sync")) if len(row) == 3}
    assert documented == {str(name): [f"{limits.mean:g}", f"{limits.p99:g}"] for name, limits in LIMITS.items()}


def test_every_file_of_a_bundle_is_documented(tmp_path: Path) -> None:
    write_bundle(plan_example("quickstart"), tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    of_files = section(RUNTIME_PAGES, "The bundle")
    assert {words(row[0])[0] for row in rows(of_files)} == files


def test_every_file_of_a_run_folder_is_documented(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    recorder.write_status("finished", 0)
    recorder.close()
    before_sections = section(RUNTIME_PAGES, "The run folder").partition("### Metrics")[0]
    folder, _, status = before_sections.partition("`status.json`:")
    documented = {words(row[0])[0] for row in rows(folder)}
    others = {
        "bundle/",
        "plan.json",
        "preflight.json",
        "data.json",
        "lengths.json",
        "rollouts/",
        "logs/",
        "start_policy/",
        "checkpoints/",
        "policy/",
        "report/",
    }
    assert documented == {path.name for path in tmp_path.iterdir()} | others
    runtime = "".join(path.read_text() for path in (ROOT / "rlplan" / "runtime").rglob("*.py"))
    assert {name for name in others - {"report/"} if f'"{name.rstrip("/")}"' not in runtime} == set()
    assert {words(row[0])[0] for row in rows(status)} == set(json.loads((tmp_path / "status.json").read_text()))


def test_every_field_of_the_trace_is_documented() -> None:
    documented: dict[str, set[str]] = {"span": set(), "memory": set()}
    for names, where, _ in rows(section(RUNTIME_PAGES, "The trace")):
        for record in documented:
            documented[record] |= set(words(names)) if where in (record, "both") else set()
    assert documented["span"] == set(Span.__dataclass_fields__)
    assert documented["memory"] == set(MemorySample.__dataclass_fields__)


def test_every_file_of_a_report_is_documented() -> None:
    from rlplan.report.write import ReportFiles

    written_files = {path.name for path in vars(ReportFiles.within(ROOT)).values()}
    assert {words(row[0])[0] for row in rows(section(RUNTIME_PAGES, "The report"))} == written_files
    beside = {"learning.png", "memory.png", "rollouts.html"}  # pictures, and the page of `rlplan rollouts`
    assert {path.name for path in (ROOT / "reports" / "quickstart").iterdir()} <= written_files | beside


@pytest.mark.parametrize("part", ["start", "step", "finish"])
def test_every_action_of_the_quickstart_is_told(part: str) -> None:
    prose = section(RUNTIME_PAGES, "Action by action")
    assert {a.id for a in getattr(plan_example("quickstart").schedule, part) if f"`{a.id}`" not in prose} == set()


def test_every_process_of_the_quickstart_is_told() -> None:
    prose = section(RUNTIME_PAGES, "Processes")
    assert {name for name in plan_example("quickstart").ledger.processes if f"`{name}`" not in prose} == set()


def test_every_file_of_a_plans_report_is_documented() -> None:
    from rlplan.report.plans.write import PlanFiles

    names = {path.name for path in vars(PlanFiles.within(Path())).values()}
    assert {words(row[0])[0] for row in rows(section(RUNTIME_PAGES, "The report of a plan"))} == names
