"""A step that is slow for a reason is explained by it: each slow setting, measured by the formulas themselves."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.planner.answers.changes import Change, ask
from rlplan.planner.answers.measured_step import MeasuredStep, OptimizerSteps, explain_step
from rlplan.planner.answers.plan_results import list_overrides, sum_phase_costs
from rlplan.planner.machine import open_search
from rlplan.planner.measured_errors import UNKNOWN_FACTOR, find_step_error
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import job_from, load_job, override_job
from rlplan.spec.measured_lengths import fit_lengths
from rlplan.spec.parts.lengths import Lengths
from rlplan.vocabulary import Phase
from tests.factories import EXAMPLES
from tests.repository.at_night import examples

JOB = load_job(EXAMPLES / "grpo-7b-8xh100.yaml", ["training.backend=fsdp2"])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return open_search(JOB).run(with_others=False)


def make_step(plan: Plan, factor: float = 1.0, **lengths: float) -> MeasuredStep:
    assert plan.timing is not None
    phases = {phase: factor * cost.seconds for phase, cost in sum_phase_costs(plan.timing.step).items()}
    return MeasuredStep("test", 9, factor * plan.seconds, phases, lengths)


def slow(plan: Plan, **settings: str) -> Plan:
    """The chosen layout with one setting changed."""
    words = list_overrides(plan.choice, plan.job, plan.asked) | {
        key.replace("__", "."): value for key, value in settings.items()
    }
    slow_plan = ask(JOB, Change(tuple(f"{key}={value}" for key, value in words.items() if value))).plan
    assert slow_plan is not None
    return slow_plan


@pytest.mark.parametrize("factor", [0.61, 1.0, 0.99 * UNKNOWN_FACTOR])
def test_while_too_little_was_measured_up_to_twice_the_prediction_is_normal(plan: Plan, factor: float) -> None:
    report = explain_step(JOB, make_step(plan, factor))
    assert report.is_normal
    assert report.causes == ()
    assert report.gaps[0].ratio == pytest.approx(factor)
    assert report.remarks == ()
    assert f"step up to {find_step_error(plan).high:.2f} times" in report.normal_words
    assert "sync up to 2.00 times" in report.normal_words


@pytest.mark.parametrize("factor", [0.3, 0.59])
def test_a_step_far_below_its_prediction_is_not_headed_normal(plan: Plan, factor: float) -> None:
    report = explain_step(JOB, make_step(plan, factor))
    assert report.words == f"shorter than predicted: the step takes {factor:.2f} times its prediction"
    assert "did it do less work" in report.remarks[0]
    assert (report.is_normal, report.causes) == (False, ())


def test_no_setting_is_blamed_that_the_job_decides_otherwise(plan: Plan) -> None:
    slow_plan = slow(plan, rollout__has_cuda_graphs="false")
    step = make_step(slow_plan)
    assert "no CUDA graphs" in explain_step(JOB, step).causes[0].words
    decided = override_job(JOB, ["rollout.has_cuda_graphs=true"])
    assert not any("no CUDA graphs" in cause.words for cause in explain_step(decided, step).causes)


@pytest.mark.parametrize("tells_apart", [True, False])
def test_a_step_of_the_job_is_made_of_the_optimizer_steps_of_a_log(tells_apart: bool) -> None:
    num = 4
    job = override_job(JOB, [f"workload.mini_batch_size={JOB.workload.num_rollouts_per_step // num}"])
    plan = open_search(job).run(with_others=False)
    assert plan.timing is not None
    train_s = sum_phase_costs(plan.timing.step)[Phase.TRAIN].seconds / num
    rest_s = plan.seconds - num * train_s
    steps = OptimizerSteps(plan.seconds / num, *((rest_s + train_s, train_s, num) if tells_apart else ()))
    report = explain_step(job, MeasuredStep("TRL", 9, train_s, {}, {}, optimizer_steps=steps))
    assert report.is_normal
    assert report.gaps[0].ratio == pytest.approx(1.0, rel=0.01)
    assert [gap.phase for gap in report.gaps] == (["step", "rollout", "train", "between"] if tells_apart else ["step"])
    assert "optimizer steps" in report.remarks[0]


def test_what_is_normal_of_training_alone_follows_the_measured_error() -> None:
    job = job_from({"policy": "Qwen/Qwen2.5-7B", "algorithm": "sft", "hardware": "8xH100"})
    alone = open_search(job).run(with_others=False)
    high = find_step_error(alone).high
    assert 1 < high < UNKNOWN_FACTOR
    assert explain_step(job, MeasuredStep("test", 9, 0.99 * high * alone.seconds, {}, {})).is_normal
    assert not explain_step(job, MeasuredStep("test", 9, 1.01 * high * alone.seconds, {}, {})).is_normal


def test_a_tail_that_neither_log_nor_job_tells_of_is_normal() -> None:
    job = override_job(JOB, ["workload.response_lengths={kind: constant}", "workload.max_response_len=8192"])
    lengths = {"mean_response_len": 900.0}
    with_tail = fit_lengths(900.0, 8192, cut_share=None, longest=8192, num_rollouts=job.workload.num_rollouts_per_step)
    slower = open_search(override_job(job, ["workload.mean_response_len=900", with_tail])).run(with_others=False)
    report = explain_step(job, MeasuredStep("test", 9, slower.seconds, {}, lengths))
    assert report.gaps[0].ratio is not None
    assert report.gaps[0].ratio > 1.2
    assert report.is_normal
    assert "a tail up to the cap would add" in report.remarks[0]
    far = MeasuredStep("test", 9, 4 * slower.seconds, {}, lengths)
    assert not explain_step(job, far).is_normal


PACKING = {"workload__response_lengths": "{kind: constant}"}


@pytest.mark.parametrize(
    ("settings", "phase", "words"),
    [
        ({"rollout__has_cuda_graphs": "false"}, "rollout", "no CUDA graphs"),
        ({"rollout__max_num_seqs": "16"}, "rollout", "too few sequences at once"),
        (
            {"training__max_tokens_per_micro_batch": "", "workload__micro_batch_size_per_gpu": "8"},
            "train",
            "padded micro-batches",
        ),
        ({"placement__transport": "disk"}, "sync", "slow weight transfer: through files"),
    ],
)
def test_a_slow_setting_is_named_as_the_cause(plan: Plan, settings: dict[str, str], phase: str, words: str) -> None:
    # the padded passes by themselves take 2.05 times as long, which is still a normal error of training
    report = explain_step(JOB, make_step(slow(plan, **settings), 1.05 if phase == "train" else 1.0))
    assert report.largest is not None
    assert report.largest.phase == phase
    assert report.causes
    assert report.causes[0].words.startswith(words)
    assert report.causes[0].left == pytest.approx(1.0, rel=0.1)


def test_packing_off_is_the_cause_of_passes_at_the_longest(plan: Plan) -> None:
    padded = make_step(slow(plan, **PACKING))
    usual = make_step(plan)
    passes = {phase: padded.phases[phase] for phase in (Phase.TRAIN, Phase.SCORE)}
    report = explain_step(JOB, MeasuredStep("verl", 9, None, usual.phases | passes, {}))
    assert report.largest is not None
    assert report.largest.phase == "train"
    assert report.causes[0].words.startswith("packing off")


def test_every_override_of_a_cause_and_of_the_lengths_parses(plan: Plan) -> None:
    slow_steps = MeasuredStep("verl", 9, None, {p: 3 * s for p, s in make_step(plan).phases.items()}, {})
    lengths = {"mean_response_len": 1300.0, "cut_share": 0.03, "mean_prompt_len": 200.0}
    for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.SCORE):
        step = MeasuredStep("verl", 9, None, {phase: slow_steps.phases[phase]}, lengths)
        report = explain_step(JOB, step)
        assert override_job(JOB, report.overrides) != JOB
        for cause in report.causes:
            override_job(JOB, shlex.split(cause.overrides))


def test_what_no_setting_explains_has_no_cause(plan: Plan) -> None:
    usual = make_step(plan).phases
    report = explain_step(JOB, MeasuredStep("verl", 9, None, usual | {Phase.ROLLOUT: 1e5}, {}))
    assert report.largest is not None
    assert report.causes == ()


def test_seconds_that_no_timer_covers_are_a_gap_of_their_own(plan: Plan) -> None:
    normal = make_step(plan)
    report = explain_step(JOB, MeasuredStep("verl", 9, 3 * plan.seconds, normal.phases, {}))
    assert report.largest is not None
    assert report.largest.phase == "between"
    assert report.largest.measured_s == pytest.approx(2 * plan.seconds)


def test_a_step_without_phases_is_explained_as_a_whole(plan: Plan) -> None:
    report = explain_step(JOB, MeasuredStep("TRL", 9, slow(plan, rollout__max_num_seqs="8").seconds, {}, {}))
    assert report.largest is not None
    assert report.largest.phase == "step"
    assert any(cause.words.startswith("too few sequences") for cause in report.causes)


def test_answers_at_the_cap_are_said(plan: Plan) -> None:
    report = explain_step(JOB, make_step(plan, 1.0, mean_response_len=6000.0, cut_share=0.55))
    assert "55% of responses end at the cap of 8,192 tokens" in report.remarks[0]
    assert report.plan.seconds > plan.seconds  # the longer answers are the workload's, not the runtime's


@pytest.mark.parametrize("lengths", [{"mean_response_len": 9000.0}, {"longest_response_len": 20_000.0},
                                     {"mean_prompt_len": 5000.0}])  # fmt: skip
def test_a_log_with_longer_answers_than_the_job_allows_is_not_its_log(plan: Plan, lengths: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="the job allows") as caught:
        explain_step(JOB, make_step(plan, 1.0, **lengths))
    assert caught.value.way_out.startswith("workload.max_")


def test_the_log_of_a_job_that_does_not_fit_is_compared_all_the_same() -> None:
    job = job_from({"policy": "Qwen/Qwen2.5-7B", "algorithm": "grpo", "hardware": "1xL4"})
    report = explain_step(job, MeasuredStep("verl", 9, 100.0, {}, {}))
    assert report.gaps[0].predicted_s > 0
    assert "does not fit where it ran" in report.remarks[0]


@examples(20)
@given(st.floats(0.05, 0.9), st.floats(0.02, 0.6))
def test_fitted_lengths_have_the_measured_mean_and_tail_wherever_some_have(part: float, share: float) -> None:
    cap = 8192
    mean = part * cap
    override = fit_lengths(mean, cap, cut_share=share, longest=None, num_rollouts=1024)
    spec = override_job(JOB, [override]).workload.response_lengths
    lengths = Lengths(spec, cap)
    at_cap = 1 - lengths.compute_probability(cap - 1)
    if share * cap * 1.3 < mean < 0.6 * cap:  # else no cut log-normal has both
        assert lengths.mean == pytest.approx(mean, rel=0.1)
        assert at_cap == pytest.approx(share, abs=0.02)
    assert 0 < lengths.mean <= cap
