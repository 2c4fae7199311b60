"""A job that trains a reward model: no engine, a scalar head, and held-out pairs that the trainer scores."""

from rlplan.planner.search import find_plan
from rlplan.spec.files.job_file import load_job
from rlplan.vocabulary import ActionKind, Phase, Role
from tests.factories import EXAMPLES

JOB = load_job(EXAMPLES / "algorithms" / "reward_modeling.yaml")
PLAN = find_plan(JOB)


def test_no_engine_is_planned_on_a_cpu_host() -> None:
    assert {layout.worker for layout in PLAN.schedule.layouts} == {"policy_trainer"}
    assert not PLAN.choice.sync_mode


def test_the_trainer_scores_the_held_out_pairs() -> None:
    evaluations = {part: [a for a in actions if a.phase is Phase.EVALUATE] for part, actions in PLAN.schedule.parts}
    for part, every in (("start", 1), ("step", 10), ("finish", 1)):
        (action,) = evaluations[part]  # type: ignore[index]
        assert (action.kind, action.role, action.every) == (ActionKind.SCORE, Role.POLICY, every)
    assert evaluations["step"][0].after == ("optimizer_step",)
    assert [evaluation.metric for evaluation in PLAN.job.evaluations] == ["evaluate/pair_accuracy"]


def test_its_model_has_a_scalar_head_in_place_of_the_language_head() -> None:
    model = PLAN.job.load_model()
    assert model.head_width == 1
    assert [parameter.shape for parameter in model.parameters if parameter.name == "score.weight"] == [
        (1, model.hidden_size)
    ]


def test_on_gpus_it_is_planned_alike() -> None:
    plan = find_plan(JOB.model_copy(update={"hardware": load_job(EXAMPLES / "dpo-8b-8xa100.yaml").hardware}))
    assert {layout.worker for layout in plan.schedule.layouts} == {"policy_trainer"}
    assert [a.kind for a in plan.schedule.step if a.phase is Phase.EVALUATE] == [ActionKind.SCORE]
