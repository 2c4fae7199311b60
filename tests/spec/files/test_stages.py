"""Several jobs in one file: what a stage is, what it takes from earlier ones, and what is refused of it."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.sources import JobWords, read_question
from rlplan.spec.files.job_file import load_job
from rlplan.spec.files.stages import list_open_inputs, stages_of
from rlplan.spec.files.yaml import read_yaml
from rlplan.vocabulary import Role
from tests.factories import EXAMPLES

FILE = EXAMPLES / "three-stage.yaml"
SORTER = str(EXAMPLES / "models" / "sorter")


def test_a_stage_is_what_all_say_and_what_it_says_itself() -> None:
    job = load_job(FILE, ["stage=sft"])
    assert (job.name, job.algorithm.name) == ("three-stage-sft", "sft")
    assert (job.workload.num_steps, job.workload.max_prompt_len) == (10, 8)


def test_a_model_that_is_not_there_yet_has_the_shape_of_what_its_stage_began_with() -> None:
    job = load_job(FILE, ["stage=ppo"])
    assert job.policy.path == SORTER
    assert job.roles.paths == {Role.REWARD: SORTER, Role.VALUE: SORTER}


def test_an_override_is_for_every_stage_or_for_one() -> None:
    words = ["seed=3", "stages.sft.workload.num_steps=2", "stages.ppo.workload.num_steps=4"]
    jobs = [load_job(FILE, [f"stage={name}", *words]) for name in ("sft", "reward", "ppo")]
    assert [job.seed for job in jobs] == [3, 3, 3]
    assert [job.workload.num_steps for job in jobs] == [2, 30, 4]


def still_open(name: str, *overrides: str) -> dict[str, str]:
    stages = stages_of(read_yaml(FILE, "the job file"), "")
    return list_open_inputs(next(stage for stage in stages if stage.name == name), overrides, stages)


def test_what_a_run_has_left_takes_the_place_of_a_stage() -> None:
    assert still_open("reward") == {"policy.path": "sft"}
    assert still_open("sft") == {}


@pytest.mark.parametrize("key", ["policy.path", "policy", "stages.reward.policy.path", "stages.reward.policy"])
def test_a_model_that_is_named_is_taken_from_no_stage(key: str) -> None:
    assert still_open("reward", f"{key}={SORTER}") == {}
    read_question("run", JobWords(str(FILE), ["stage=reward", f"{key}={SORTER}"]))


def test_a_model_that_is_named_for_another_stage_or_role_leaves_the_rest() -> None:
    reward = {"roles.reward.path": "reward", "roles.value.path": "reward"}
    assert still_open("reward", f"stages.ppo.policy={SORTER}", "policy.init=pretrained") == {"policy.path": "sft"}
    assert still_open("ppo", f"policy={SORTER}") == reward
    assert still_open("ppo", f"roles={{reward: {SORTER}}}") == {"policy.path": "sft"}


def test_one_job_is_asked_for_and_none_is_chosen() -> None:
    with pytest.raises(SpecError, match="the file has 3 stages") as caught:
        load_job(FILE)
    assert caught.value.way_out == "stage=sft"


@pytest.mark.parametrize("verb", ["emit", "run"])
def test_what_will_run_needs_the_models_of_earlier_stages(verb: str) -> None:
    with pytest.raises(SpecError, match=r"policy\.path is the model of stage sft, which has not run yet"):
        read_question(verb, JobWords(str(FILE), ["stage=ppo"]))
    assert read_question("plan", JobWords(str(FILE), ["stage=ppo"])).job.algorithm.name == "ppo"
    assert read_question(verb, JobWords(str(FILE), ["stage=sft"])).job.algorithm.name == "sft"


def stage(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


SFT, REWARD = stage("sft", algorithm="sft"), stage("reward", algorithm={"name": "reward_modeling"}, policy="stage:sft")


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ([], r"stages: \[\]"),
        ("sft", "stages: 'sft'"),
        ([SFT] * 2, "two stages are named 'sft'"),
        ([{"algorithm": "sft"}], r"stages\[0\]: "),
        ([stage("a b")], r"stages\[0\]: "),
        ([stage("one", policy="stage:one")], "no earlier stage is named 'one'"),
        ([SFT, stage("two", policy="stage:sfd")], "no earlier stage is named 'sfd'"),
        (
            [SFT, REWARD, stage("ppo", policy="stage:reward")],
            "stage reward saves a reward model, policy needs a policy",
        ),
        ([SFT, stage("ppo", roles={"reward": {"path": "stage:sft"}})], "stage sft saves a policy, roles.reward needs"),
    ],
)
def test_stages_that_will_not_do_are_refused(stages: Any, what: str) -> None:
    with pytest.raises(SpecError, match=what):
        stages_of({"policy": SORTER, "stages": stages}, "job.yaml")


def test_weights_that_are_drawn_are_those_of_the_first_stage_alone() -> None:
    stages = [SFT, stage("two", policy={"path": "stage:sft"})]
    first, second = stages_of({"policy": {"path": SORTER, "init": "random"}, "stages": stages}, "job.yaml")
    assert first.data["policy"] == {"path": SORTER, "init": "random"}
    assert second.data["policy"] == {"path": SORTER}


def test_a_stage_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="unknown stage 'pop'") as caught:
        load_job(FILE, ["stage=pop"])
    assert "Did you mean 'ppo'" in str(caught.value)
    assert caught.value.way_out == "stage=sft"
