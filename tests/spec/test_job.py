"""Jobs: loading, overrides, every kind of mistake in a job file, and paths that move with their folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlplan.errors import SpecError
from rlplan.planner.executable import list_missing
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.job_file import job_from, load_job
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.rewards import AnswerMatcherSpec, FormatCheckerSpec
from rlplan.spec.resolved import ResolvedJob, resolve_on_cpu
from rlplan.units import GIB, MIB
from tests.factories import EXAMPLES, JOB_EXAMPLES, QUICKSTART, job_data, make_job, write_config, write_job


def refuse(**overrides: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        make_job(**overrides)
    assert caught.value.exit_code == 2
    assert caught.value.rule
    assert caught.value.way_out
    return caught.value


def test_the_quickstart_is_read_as_it_is_written() -> None:
    job = load_job(QUICKSTART)
    assert (job.name, job.seed, job.algorithm.name, job.algorithm.learning_rate) == ("quickstart", 0, "grpo", 3e-5)
    assert (job.hardware.memory, job.rollout.kv_cache_memory) == (8 * GIB, 32 * MIB)
    assert (job.workload.num_rollouts_per_step, job.workload.num_mini_batches, job.workload.max_seq_len) == (256, 1, 20)
    assert job.rewards == (
        AnswerMatcherSpec(kind="answer_matcher"),
        FormatCheckerSpec(kind="format_checker", weight=0.2, pattern=r"<answer>\d+</answer>"),
    )


@pytest.mark.parametrize("path", JOB_EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_with_its_model_and_profile(path: Path) -> None:
    job = resolve_on_cpu(load_job(path))
    assert job.name == path.stem
    assert job.load_model().num_parameters > 0
    assert job.load_profile().name == job.hardware.profile
    for place in (job.policy.path, *(file for _, file in job.needed_data.files)):
        assert Path(place).is_absolute()
        assert Path(place).exists()


def test_overrides_are_laid_over_the_file() -> None:
    job = load_job(QUICKSTART, ["workload.num_steps=5", "algorithm.learning_rate=1e-5", "hardware.memory=6GiB"])
    assert (job.workload.num_steps, job.algorithm.learning_rate, job.hardware.memory) == (5, 1e-5, 6 * GIB)


def test_a_relative_override_is_relative_to_the_job_file() -> None:
    job = load_job(QUICKSTART, ["policy.path=models/decoder-160m", "policy.init=random"])
    assert job.policy.path == str(EXAMPLES / "models" / "decoder-160m")


PARTS = {"": ResolvedJob} | {
    name: field.annotation
    for name, field in ResolvedJob.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Spec)
}


@pytest.mark.parametrize(("path", "kind"), PARTS.items(), ids=str)
def test_an_unknown_key_is_refused_at_every_level(path: str, kind: type[Spec]) -> None:
    dotted = f"{path}.no_such_key" if path else "no_such_key"
    error = refuse(**{dotted: 1})
    assert error.what == "unknown key 'no_such_key'"
    assert error.where == f"job.yaml: {dotted}"
    assert error.rule.startswith("allowed here: ")
    assert set(error.rule.removeprefix("allowed here: ").rstrip(".").split(", ")) == set(kind.model_fields)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("polcy", "policy"),
        ("hardware.num_device", "num_devices"),
        ("algorithm.learning_rat", "learning_rate"),
        ("workload.num_stepz", "num_steps"),
        ("training.zero_stge", "zero_stage"),
        ("rollout.kv_cache_mem", "kv_cache_memory"),
        ("placement.transprt", "transport"),
        ("limits.start_timeout", "start_timeout_s"),
        ("controls.shuffle_reward", "shuffle_rewards"),
    ],
)
def test_a_misspelt_key_is_told_its_right_name(wrong: str, hint: str) -> None:
    assert f"Did you mean '{hint}'?" in refuse(**{wrong: 1}).rule


def test_a_misspelt_key_in_a_list_is_told_its_right_name_and_place() -> None:
    error = refuse(rewards=[{"kind": "format_checker"}, {"kind": "answer_matcher", "patern": "(x)"}])
    assert error.what == "unknown key 'patern'"
    assert error.where == "job.yaml: rewards.1.patern"
    assert error.rule == "allowed here: compares, kind, name, pattern, timeout_s, weight. Did you mean 'pattern'?"


@pytest.mark.parametrize("key", ["policy", "policy.path", "hardware", "hardware.profile", "data.prompts"])
def test_a_missing_key_is_named_with_its_place(key: str) -> None:
    data = job_data()
    *parents, last = key.split(".")
    part = data
    for parent in parents:
        part = part[parent]
    del part[last]
    with pytest.raises(SpecError) as caught:
        validate(JobSpec, data, file="job.yaml")
    assert caught.value.what == f"required key '{last}' is missing"
    assert caught.value.where == f"job.yaml: {key}"
    assert caught.value.way_out == f"add `{last}:` there"


WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("schema_version", 3, "Input should be 2"),
    ("schema_version", "2", "Input should be 2"),
    ("name", "", "String should match pattern"),
    ("name", "a b", "String should match pattern"),
    ("name", "../up", "String should match pattern"),
    ("name", "x" * 65, "String should match pattern"),
    ("name", 5, "valid string"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**31, "less than 2147483648"),
    ("seed", 1.5, "valid integer"),
    ("seed", "3", "valid integer"),
    ("seed", True, "valid integer"),
    ("policy", 5, "should be an object"),
    ("policy.init", "chekpoint", "'checkpoint' or 'random'. Did you mean 'checkpoint'?"),
    ("hardware.num_devices", 0, "greater than or equal to 1"),
    ("hardware.num_devices", "two", "valid integer"),
    ("hardware.num_devices", 2_000_000, "less than or equal to 1048576"),
    ("hardware.memory", "80G", "a number with one of B, KiB, MiB, GiB, TiB"),
    ("hardware.memory", -1, "not negative"),
    ("hardware.memory", 1.5, "a byte count is an integer"),
    ("hardware.memory", True, "a byte count is an integer"),
    ("hardware.memory", "9" * 30 + "GiB", "below 8388608TiB"),
    ("algorithm.name", "grpoo", "ppo, reinforce++, reinforce++_baseline, remax, rloo. Did you mean 'grpo'?"),
    ("algorithm.learning_rate", -1e-5, "greater than or equal to 0"),
    ("algorithm.learning_rate", float("nan"), "finite number"),
    ("algorithm.learning_rate", float("inf"), "finite number"),
    ("algorithm.learning_rate", "1e-5", "valid number"),
    ("algorithm.adam_beta1", 1.0, "less than 1"),
    ("algorithm.clip_low", 0, "greater than 0"),
    ("algorithm.clip_low", 1, "less than 1"),
    ("algorithm.kl_coef", -0.1, "greater than or equal to 0"),
    ("workload.num_steps", 0, "greater than or equal to 1"),
    ("workload.num_steps", 10**8, "less than or equal to 10000000"),
    ("workload.num_steps", None, "valid integer"),
    ("workload.num_prompts_per_step", 10**12, "less than or equal to"),
    ("workload.temperature", 0, "greater than or equal to 0.01"),
    ("workload.ignores_eos", "no", "valid boolean"),
    ("data.prompts", ["a.jsonl"], "valid string"),
    ("workload.evaluate_every", 0, "greater than or equal to 1"),
    ("rewards", {"kind": "answer_matcher"}, "array"),
    ("rewards", [{"kind": "answer_matchr"}], "Did you mean 'answer_matcher'?"),
    ("rewards", [{"weight": 1.0}], "discriminator 'kind'"),
    ("rewards", ["answer_matcher"], "should be an object"),
    ("rewards", [{"kind": "answer_matcher", "pattern": "no group"}], "needs one (group)"),
    ("rewards", [{"kind": "answer_matcher", "pattern": "(open"}], "not a regular expression"),
    ("rewards", [{"kind": "format_checker", "pattern": "a{99999999999999}"}], "not a regular expression"),
    ("rewards", [{"kind": "format_checker", "pattern": "(" * 3000 + ")" * 3000}], "not a regular expression"),
    ("rewards", [{"kind": "format_checker", "pattern": "((a{1000}){1000}){1000}"}], "have 1,000,000,000 parts"),
    ("rewards", [{"kind": "format_checker", "weight": float("nan")}], "finite number"),
    ("training.dtype", "int8", "Input should be 'float32', 'bfloat16' or 'float16'"),
    ("training.zero_stage", 4, "Input should be 'auto', 0, 1, 2 or 3"),
    ("training.zero_stage", "2", "Input should be 'auto', 0, 1, 2 or 3"),
    ("training.reduce_bucket_size", 10, "greater than or equal to 1000"),
    ("rollout.block_size", 8, "16, 32, 64 or 128"),
    ("rollout.kv_cache_memory", "1e3MiB", "a number with one of"),
    ("rollout.max_num_seqs", 2**40, "less than or equal to"),
    ("placement.placement", "colocatd", "Did you mean 'colocated'?"),
    ("placement.transport", "pigeon", "Input should be 'auto', 'shared_memory', 'gloo', 'disk', 'cuda_ipc' or 'nccl'"),
    ("limits.start_timeout_s", 0, "greater than 0"),
    ("controls.skip_sync_after_step", 0, "greater than or equal to 1"),
    ("controls.shuffle_rewards", "maybe", "valid boolean"),
]


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("workload.response_lengths={kind: normal}", "{kind: lognormal, median: 600, sigma: 0.9}"),
        ("workload.response_lengths={kind: unifrm}", "{kind: uniform, low: 100, high: 2000}"),
        ("training.lora=16", "{rank: 16}"),
        ("rollout.kv_cache_memory=80G", "80GiB"),
    ],
)
def test_the_way_out_of_a_wrong_value_is_a_job_that_is_read(override: str, way_out: str) -> None:
    answers = {"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100"}
    with pytest.raises(SpecError) as caught:
        job_from(answers, [override])
    right = f"{override.partition('=')[0]}={way_out}"
    assert right in caught.value.way_out
    assert job_from(answers, [right]).policy


@pytest.mark.parametrize(("key", "value", "rule"), WRONG_VALUES, ids=lambda value: str(value)[:30])
def test_a_wrong_type_unit_or_value_is_refused_with_key_value_and_rule(key: str, value: Any, rule: str) -> None:
    error = refuse(**{key: value})
    assert error.where.startswith(f"job.yaml: {key}")
    assert error.what.startswith(key)
    assert rule in error.rule
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (
            {"workload.mini_batch_size": 5},
            "num_prompts_per_step x num_samples_per_prompt = 16 must be a multiple of mini_batch_size = 5",
        ),
        ({"workload": {"num_prompts_per_step": 300, "mini_batch_size": 4}}, "= 300 optimizer steps in one RL step"),
        (
            {"workload": {"num_samples_per_prompt": 1, "mini_batch_size": 4}},
            "workload.num_samples_per_prompt = 1 must be at least 2",
        ),
        ({"rollout.max_num_batched_tokens": 19}, "workload.max_prompt_len + max_response_len = 20"),
        (
            {"rollout": {"max_num_batched_tokens": 100, "max_num_seqs": 101}},
            "rollout.max_num_batched_tokens = 100 must be at least rollout.max_num_seqs = 101",
        ),
        (
            {"rewards": [{"kind": "answer_matcher"}, {"kind": "answer_matcher", "weight": 2.0}]},
            "each name (by default the kind) occurs at most once, these are answer_matcher, answer_matcher",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_with_both_numbers(overrides: dict[str, Any], what: str) -> None:
    assert what in refuse(**overrides).what


def test_a_group_needs_two_rollouts_but_every_count_may_be_at_its_smallest() -> None:
    job = make_job(workload={"num_prompts_per_step": 1, "num_samples_per_prompt": 2, "mini_batch_size": 2})
    assert (job.workload.num_rollouts_per_step, job.workload.num_mini_batches) == (2, 1)


@pytest.mark.parametrize("key", ["policy.path", "data.prompts", "data.heldout"])
@pytest.mark.parametrize("name", ["nowhere", "x" * 5000, "nul\0byte", "nowhere/../nor here"], ids=range(4))
def test_a_path_that_does_not_exist_is_named_with_its_key(tmp_path: Path, key: str, name: str) -> None:
    path = write_job(tmp_path, **{key: name})
    with pytest.raises(SpecError) as caught:
        load_job(path)
    assert caught.value.where == f"{path}: {key}"
    assert "does not exist" in caught.value.what


@pytest.mark.parametrize("key", ["policy.path", "data.prompts", "data.heldout"])
def test_a_pipe_is_refused_before_anybody_waits_for_its_end(tmp_path: Path, key: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="pipe' is neither a file nor a folder"):
        load_job(write_job(tmp_path, **{key: "pipe"}))


@pytest.mark.parametrize("text", ["", "just words", "- a\n- b", "42", "null"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_job(path)
    assert caught.value.where == str(path)
    assert "schema_version, name, seed" in caught.value.rule


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError) as caught:
        make_job(**{"hardware.profile": "cpu-hots"}).load_profile()
    assert caught.value.what == "hardware profile 'cpu-hots' is unknown"
    assert "Did you mean 'cpu-host'?" in caught.value.rule


def test_more_devices_than_the_profile_has_are_refused_with_both_numbers() -> None:
    with pytest.raises(SpecError, match=r"hardware\.num_devices is 65, profile 'cpu-host' has at most 64"):
        make_job(**{"hardware.num_devices": 65}).load_profile()


def test_sequences_longer_than_the_model_takes_are_refused_with_both_numbers() -> None:
    job = make_job(workload={"max_prompt_len": 200, "max_response_len": 57})
    with pytest.raises(SpecError, match="may reach 257 tokens, the model's limit is 256"):
        job.load_model()
    assert (
        make_job(workload={"max_prompt_len": 200, "max_response_len": 56}).load_model().max_position_embeddings == 256
    )


def test_the_reference_model_is_there_only_when_the_kl_term_counts() -> None:
    assert make_job().frozen_roles == ("reference",)
    assert make_job(**{"algorithm.kl_coef": 0}).frozen_roles == ()


def test_a_job_cannot_be_changed_after_it_was_read() -> None:
    with pytest.raises(ValidationError):
        make_job().seed = 3  # type: ignore[misc]


def test_relative_paths_are_read_from_the_folder_of_the_job(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write_config(here / "model")
    (here / "prompts.jsonl").write_text("{}")
    data = {
        "policy.path": "model",
        "data": {"prompts": "prompts.jsonl", "heldout": "./model/../prompts.jsonl"},
    }
    write_job(here, **data)
    job = load_job(here / "job.yaml")
    assert job.policy.path == str(here / "model")
    assert job.data is not None
    assert job.data.prompts == job.data.heldout == str(here / "prompts.jsonl")
    moved = tmp_path / "there"
    shutil.move(here, moved)
    assert load_job(moved / "job.yaml").policy.path == str(moved / "model")


@given(
    st.lists(st.sampled_from(["a", "b", "data", ".."]), max_size=5),
    st.lists(st.sampled_from(["out", "runs", "deep"]), max_size=4),
)
def test_paths_made_relative_and_absolute_again_are_the_same(parts: list[str], folder_parts: list[str]) -> None:
    job = make_job().map_paths(lambda _: os.path.normpath(Path("/srv/jobs").joinpath(*parts)))
    folder = Path("/srv/rlplan-tests").joinpath(*folder_parts)
    portable = job.make_relative(folder)
    assert not portable.policy.path.startswith("/")
    assert portable.resolve_paths(folder) == job


def test_without_rewards_a_reward_model_or_a_teacher_stands_in() -> None:
    (lacks,) = list_missing(make_job(rewards=[]))
    assert "one of the three is needed" in lacks[0]
    assert not list(list_missing(make_job(rewards=[], **{"roles.teacher.path": "other"})))
    assert make_job(rewards=[], **{"roles.teacher.path": "other"}).scored_roles == ("reference", "teacher")


def test_ppo_has_a_value_model_with_processes_of_its_own_or_the_policys() -> None:
    own, shared = (
        make_job(**{"algorithm.name": "ppo", "roles.value.shares_backbone": shares}) for shares in (False, True)
    )
    assert own.scored_roles == shared.scored_roles == ("policy", "value", "reference")
    assert (own.trained_roles, shared.trained_roles) == (("policy", "value"), ("policy",))
    assert own.frozen_roles == shared.frozen_roles == ("reference",)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"roles.value.shares_backbone": True}, "grpo has no value model"),
        ({"roles.reference.path": "other", "algorithm.kl_coef": 0}, "nothing reads the reference"),
        (
            {"algorithm.name": "ppo", "roles.value": {"path": "other", "shares_backbone": True}},
            "cannot have a path",
        ),
    ],
)
def test_roles_that_would_not_be_used_are_refused(overrides: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        make_job(**overrides)


def test_paths_of_roles_move_with_the_job(tmp_path: Path) -> None:
    job = make_job(**{"roles.reward.path": "judge", "roles.reference.path": "anchor"}).resolve_paths(tmp_path)
    assert job.roles.paths == {"reference": str(tmp_path / "anchor"), "reward": str(tmp_path / "judge")}
    assert job.make_relative(tmp_path).roles.paths == {"reference": "anchor", "reward": "judge"}


@pytest.mark.parametrize("key", ["path", "adapter"])
def test_a_teacher_beside_a_loss_that_weighs_no_tokens_is_refused(key: str) -> None:
    """Its later updates, and rollouts of an engine in 16 bits, would count as if the policy had not moved."""
    pairs = {"algorithm.name": "online_dpo", "algorithm.kl_coef": 0.1, "training.lora": {"rank": 4}}
    with pytest.raises(SpecError, match="distillation weighs each token") as caught:
        make_job(**pairs, **{f"roles.teacher.{key}": "other"})
    assert caught.value.way_out.endswith(f"roles.teacher.{key}=null leaves the teacher out")
    make_job(**pairs, **{f"roles.teacher.{key}": None})
    make_job(**{**pairs, "algorithm.name": "grpo"}, **{f"roles.teacher.{key}": "other"})


def test_rewards_of_an_algorithm_that_learns_from_answers_are_not_shuffled() -> None:
    answers = {"algorithm.name": "sft", "workload.num_samples_per_prompt": 1, "workload.mini_batch_size": 4}
    make_job(**answers)
    with pytest.raises(SpecError, match="sft, which learns from answers and no rewards"):
        make_job(**answers, **{"controls.shuffle_rewards": True})
