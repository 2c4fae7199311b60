"""One place gives the interval of a quantity, and every command shows the same one for the same job."""

from typing import Any

import pytest

import rlplan
from rlplan.accuracy.compare import compare
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.predict import plan_point_job
from rlplan.accuracy.training.job import training_job
from rlplan.foreign.check import Asked, check, import_job
from rlplan.foreign.source import read_source
from rlplan.planner.answers.measured_step import MeasuredStep, explain_step
from rlplan.planner.answers.plan_results import describe_peak_error, describe_step_error, results_as_json
from rlplan.planner.measured_errors import (
    LEAST_POINTS,
    PEAK,
    STEP,
    TRAINING,
    UNKNOWN_FACTOR,
    Stratum,
    find_error,
    find_peak_error,
    find_step_error,
    find_stratum,
    list_errors,
    predict_peak_interval,
)
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.job import JobSpec
from rlplan.vocabulary import MemoryKind, Phase
from tests.factories import ROOT, gpu_job, make_job

SCRIPT = ROOT / "tests" / "foreign" / "reports" / "o908.sh"
HARDWARE = "16xH20"
DENSE = Stratum(is_moe=False)


@pytest.fixture(scope="module")
def imported_spec() -> JobSpec:
    return import_job(read_source(SCRIPT, None, ["MB=1"]), Asked(HARDWARE))[1]


@pytest.fixture(scope="module")
def plan(imported_spec: JobSpec) -> Plan:
    return rlplan.plan(as_mapping(imported_spec)).plan


def as_mapping(job: JobSpec) -> dict[str, Any]:
    return job.model_dump(mode="json", exclude_unset=True)


def test_the_same_job_has_the_same_interval_through_plan_check_and_compare(imported_spec: JobSpec, plan: Plan) -> None:
    planned = results_as_json(plan)
    checked = check(read_source(SCRIPT, None, ["MB=1"]), Asked(HARDWARE)).as_json()["results"]
    [row] = rlplan.compare(as_mapping(imported_spec), hardware=[HARDWARE]).rows()
    for key in ("step_error", "phase_errors", "peak_bytes", "peak_error"):
        assert planned[key] == checked[key], key
    assert tuple(row["step_interval_s"]) == (planned["step_error"]["low_s"], planned["step_error"]["high_s"])
    assert tuple(row["peak_interval_bytes"]) == (planned["peak_bytes"]["low"], planned["peak_bytes"]["high"])


def test_what_is_normal_of_a_measured_step_is_the_interval_of_its_plan() -> None:
    job = load_job(ROOT / "examples" / "grpo-7b-8xh100.yaml", [])
    report = explain_step(job, MeasuredStep("test", 3, 90.0, {Phase.TRAIN: 1.0}, {}))
    assert report.error == find_step_error(report.plan)
    phases = results_as_json(report.plan)["phase_errors"]
    assert {gap.phase: gap.longest_normal for gap in report.gaps}["train"] == phases["train"]["high"]


def test_a_point_has_the_interval_of_the_plan_of_its_job() -> None:
    [point] = [known for known in bundled_points() if known.id == "simumax-llama3-70b-l12-tp1-pp2-dp4-mbc4-mem"]
    [compared] = compare([point]).points
    planned = plan_point_job(training_job(point))
    assert compared.stratum == find_stratum(planned, PEAK) == Stratum(is_moe=False, framework="megatron")
    assert compared.interval == pytest.approx(
        find_error(PEAK, compared.stratum).interval(float(compared.predicted or 0))
    )


def test_a_stratum_without_enough_points_has_the_interval_of_its_models_and_then_of_all() -> None:
    known = {(error.kind, error.of) for error in list_errors() if error.is_known}
    assert (PEAK, "dense models, megatron") in known
    assert find_error(PEAK, Stratum(False, "megatron")).of == "dense models, megatron"
    assert find_error(PEAK, Stratum(True, "nobody")).of == "mixtures of experts"
    assert find_error(TRAINING, Stratum(False, "deepspeed")).of in ("dense models", "")


@pytest.mark.parametrize("kind", ["phase_refit", "vllm_profile_peak", "nothing_of_that_name"])
def test_too_few_points_are_a_factor_of_two_and_say_so(kind: str) -> None:
    error = find_error(kind, DENSE)
    assert not error.is_known
    assert error.num_points < LEAST_POINTS
    assert error.interval(10.0) == (5.0, 20.0)
    assert error.words.startswith("unknown, take a factor of 2: ")


def test_steps_with_rollouts_borrow_from_their_phases_while_nearly_all_points_are_of_one_source() -> None:
    error = find_error(STEP, Stratum(False, "verl"))
    assert error.num_points >= LEAST_POINTS
    assert error.is_known
    assert error.factor >= UNKNOWN_FACTOR
    assert (error.inside_left_out or 0) >= 0.9


def test_cpu_hosts_have_no_interval_of_their_own() -> None:
    host = find_best_plan(make_job())
    assert not find_step_error(host).is_known
    assert describe_peak_error(host) == ""
    if host.timing is not None:
        assert "CPU hosts" in describe_step_error(host)


def test_the_interval_of_a_peak_holds_its_worst_case_and_leaves_the_cache_as_it_is(plan: Plan) -> None:
    low, high = plan.interval()
    least, most = plan.row_interval()
    assert low <= least <= plan.binding.num_bytes <= most <= high
    cache = sum(size for _, _, kind, size in plan.binding.rows if kind is MemoryKind.KV_CACHE)
    error = find_peak_error(plan)
    if error.is_known:
        assert predict_peak_interval(plan)[1] - cache == pytest.approx(
            error.factor * (plan.binding.num_bytes - cache), abs=2
        )


def test_where_nothing_is_known_of_an_engine_the_factor_is_of_the_part_that_is_unknown() -> None:
    job = {"policy": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "hardware": {"profile": "l4", "num_devices": 1}}
    engine = find_best_plan(gpu_job(job, ["placement.placement=hybrid"]))
    weights = sum(size for _, _, kind, size in engine.binding.rows if kind is MemoryKind.WEIGHTS)
    low, high = predict_peak_interval(engine)
    assert weights < low < engine.binding.num_bytes < high
    if not find_peak_error(engine).is_known:
        assert high < UNKNOWN_FACTOR * (engine.binding.num_bytes - weights) + weights


def test_a_plan_that_fits_says_where_measured_peaks_reach_beyond_the_gpu(plan: Plan) -> None:
    beyond = plan.interval()[1] > plan.binding_capacity
    says = "but the verdict follows the computed worst case" in describe_peak_error(plan)
    assert says is (beyond and plan.fit is Verdict.FITS)
