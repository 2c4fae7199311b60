"""Declarations: those of the package, those in a user's file, and nobody else naming an algorithm."""

import ast
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.planner.plan import dump_plan, read_plan
from rlplan.planner.search import find_plan
from rlplan.spec.declaration import Algorithm, read_declaration
from rlplan.spec.files.job_file import load_job, override_job
from rlplan.spec.parts.algorithm import ALGORITHMS, AlgorithmSpec
from rlplan.vocabulary import Role
from tests.factories import ROOT, make_job, make_plan, write_job
from tests.repository.sources import nodes, sources

OWN = """
import a_module_that_nobody_has
from rlplan.spec.declaration import Algorithm
from rlplan.vocabulary import Role

MINE = Algorithm(
    name="mine",
    source="nobody",
    trained_roles=(Role.POLICY, Role.VALUE),
    advantage="generalized",
    loss="log_prob",
    defaults={"kl_coef": 0.0, "clip_high": 0.5},
)
NOT_ONE = 7
COMPUTED = Algorithm(name="a" + str(1), source="", advantage="", loss="")
raise SystemExit("planning ran this file")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_declaration_of_one_s_own_is_read_without_running_its_file(file: Path) -> None:
    place, declared = read_declaration("mine.py:MINE", file.parent)
    assert place == f"{file.resolve()}:MINE"
    assert Algorithm.model_validate(declared).trained_roles == (Role.POLICY, Role.VALUE)


def test_a_job_with_it_is_planned_and_its_plan_read_back(file: Path) -> None:
    path = write_job(file.parent, algorithm={"path": "mine.py:MINE", "name": "mine", "learning_rate": 1e-5})
    plan = find_plan(load_job(path))
    assert plan.job.trained_roles == (Role.POLICY, Role.VALUE)
    assert (plan.job.algorithm.kl_coef, plan.job.algorithm.clip_high) == (0.0, 0.5)
    saved = file.parent / "plan.json"
    saved.write_text(dump_plan(plan, file.parent))
    assert read_plan(saved).job.algorithm == plan.job.algorithm


@pytest.mark.parametrize("algorithm", ["grpo", {"name": "ppo", "learning_rate": 1e-5}, None])
def test_the_path_alone_brings_the_declared_name(file: Path, algorithm: Any) -> None:
    """Whatever the job was trained by before: in an override, and laid over a job that was read already."""
    job_file = write_job(file.parent, **({} if algorithm is None else {"algorithm": algorithm}))
    assert load_job(job_file, ["algorithm.path=mine.py:MINE"]).algorithm.name == "mine"
    other = override_job(load_job(job_file), [f"algorithm.path={file}:MINE"])
    assert (other.algorithm.name, other.trained_roles) == ("mine", (Role.POLICY, Role.VALUE))
    assert other.algorithm.path == f"{file.resolve()}:MINE"


@pytest.mark.parametrize("overrides", [[], ["algorithm.name=ppo"], ["algorithm={name: ppo, path: 'mine.py:MINE'}"]])
def test_a_name_beside_the_path_that_is_not_the_declared_one_is_told_it(file: Path, overrides: list[str]) -> None:
    job_file = write_job(file.parent, algorithm={"path": "mine.py:MINE", "name": "grpo"})
    with pytest.raises(SpecError, match="declares 'mine'") as caught:
        load_job(job_file, overrides)
    assert caught.value.way_out == "algorithm.name=mine"
    assert load_job(job_file, [*overrides, caught.value.way_out]).algorithm.name == "mine"


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("mine.py", "a file and a name in it"),
        ("mine.py:OTHER", "at the top level"),
        ("mine.py:NOT_ONE", "a call of Algorithm"),
        ("mine.py:COMPUTED", "parsed, not run"),
        ("missing.py:MINE", "must exist"),
    ],
)
def test_a_file_without_a_declaration_is_refused(file: Path, place: str, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_declaration(place, file.parent)
    assert rule in caught.value.rule


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("M = Algorithm(name='a', source='', advantage='x', loss='y', defaults={[]: 1})", "unhashable"),
        ("M = " + "-" * 70_000 + "1", "is not Python: ."),
        *(
            (
                f"M = Algorithm(name='a', source='', advantage='x', loss='y', trained_roles=({roles}))",
                "trained_roles is the policy",
            )
            for roles in ("", "Role.VALUE,", "Role.REWARD,", "Role.POLICY, Role.POLICY", "Role.POLICY, Role.REFERENCE")
        ),
    ],
)
def test_a_declaration_that_no_run_could_follow_is_refused(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SpecError, match=what):
        read_declaration("mine.py:M", tmp_path)


def test_what_a_job_leaves_out_is_as_the_algorithm_has_it_and_what_it_says_wins() -> None:
    assert AlgorithmSpec(name="dapo").clip_high == 0.28
    assert AlgorithmSpec(name="dapo", clip_high=0.3).clip_high == 0.3


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_declaration_s_defaults_are_keys_of_a_job(algorithm: Algorithm) -> None:
    assert set(algorithm.defaults) <= set(AlgorithmSpec.model_fields)


TWO = {"workload.num_samples_per_prompt": 2, "workload.mini_batch_size": 8}


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"algorithm.name": "dpo"}, "must be 2"),
        ({"algorithm.name": "dpo", "algorithm.kl_coef": 0.0}, "beta"),
        ({"algorithm.name": "online_dpo", "workload.micro_batch_size_per_gpu": 1}, "two longest sequences"),
        ({"algorithm.name": "online_dpo", "workload.mini_batch_size": 2}, "must be a multiple"),
        ({"algorithm.value_warmup_steps": 1}, "has no value model"),
        ({"algorithm.name": "sft"}, "must be 1"),
        ({"algorithm.name": "reward_modeling", **TWO}, "learns only from pairs"),
        ({"algorithm.name": "reward_modeling", "algorithm.kl_coef": 0.1}, "trains no distribution"),
        (
            {"algorithm.name": "ppo", "algorithm.value_warmup_steps": 1, "roles.value.shares_backbone": True},
            "trained with it",
        ),
        ({"algorithm.importance_low": 3.0}, "must be below"),
        ({"algorithm.importance": "none", "algorithm.importance_veto": 1e-4}, "none ignores importance_level and"),
        (
            {"algorithm.importance": "none", "algorithm.importance_level": "sequence"},
            "none ignores importance_level and",
        ),
        ({"algorithm.name": "cispo", "algorithm.dual_clip": 3}, "clips no ratio"),
        ({"algorithm.dual_clip": 0.5}, "must be above 1"),
        ({"algorithm.has_unbiased_kl": True, "algorithm.kl_coef": 0}, "only the KL of sampled tokens in the loss"),
        ({"algorithm.has_unbiased_kl": True, "algorithm.name": "ppo"}, "only the KL of sampled tokens in the loss"),
        ({"algorithm.overlong_buffer": 13}, "at most workload.max_response_len"),
        ({"placement.max_buffered_groups": 3}, "must hold one step's prompts"),
    ],
)
def test_keys_that_disagree_are_refused(overrides: dict[str, object], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        make_job(**overrides)


def test_a_wrong_count_of_given_answers_is_told_the_right_one() -> None:
    with pytest.raises(
        SpecError, match=r"kto reads one answer .* with an answer to another prompt: .* not 8"
    ) as caught:
        make_job(**{"algorithm.name": "kto", "workload.num_samples_per_prompt": 8})
    assert caught.value.way_out == "workload.num_samples_per_prompt=2, or leave it out"


def test_nothing_outside_of_their_file_names_an_algorithm() -> None:
    """No other file has an algorithm's name as a whole string outside docstrings. Names in published data (accuracy/)
    are exempt.
    """
    places = set()
    for path in sources():
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith("rlplan/") or place.startswith(("rlplan/spec/algorithms/", "rlplan/accuracy/")):
            continue
        strings = {n.value for n in nodes(path) if isinstance(n, ast.Constant)}
        if strings & set(ALGORITHMS):
            places.add(place)
    assert places == set()


@pytest.mark.parametrize(
    ("name", "num_samples", "shares", "trained"),
    [
        ("grpo", 8, 2, 32),
        ("online_dpo", 8, 1, 16),
        ("online_dpo", 8, 3, 6),
        ("dpo", 2, 2, 32),
        ("online_dpo", 2, 2, 32),
    ],
)
def test_of_pairs_only_the_best_and_the_worst_are_trained(
    name: str, num_samples: int, shares: int, trained: int
) -> None:
    """64 rollouts: eight groups of eight are 16 answers of pairs, which three shares take as 3, 3 and 2 pairs."""
    keys = {"workload.num_samples_per_prompt": num_samples, "workload.num_prompts_per_step": 64 // num_samples}
    job = make_job(**{"algorithm.name": name, "algorithm.kl_coef": 0.1, "workload.mini_batch_size": 64, **keys})
    assert job.count_trained(shares) == trained


@pytest.mark.parametrize(
    ("overrides", "importance"),
    [
        ({}, "none"),
        ({"training.dtype": "bfloat16"}, "truncate"),
        ({"rollout.dtype": "float16"}, "truncate"),
        ({"rollout.quantization": "fp8"}, "truncate"),
        ({"placement.placement": "disaggregated", "placement.max_staleness": 1}, "truncate"),
        ({"training.dtype": "bfloat16", "algorithm.importance": "none"}, "none"),
        ({"training.dtype": "bfloat16", "algorithm.importance": "mask"}, "mask"),
        ({"training.dtype": "bfloat16", "algorithm.name": "online_dpo", "algorithm.kl_coef": 0.1}, "none"),
    ],
)
def test_importance_is_corrected_by_default_where_log_probs_differ(overrides: dict[str, Any], importance: str) -> None:
    job = make_job(**overrides)
    assert job.algorithm.importance == importance


@pytest.mark.parametrize(
    ("level", "bounds"), [("token", (0.5, 5.0)), ("sequence", (0.0, 3.0)), ("geometric", (0.999, 1.001))]
)
def test_a_mask_has_the_published_bounds_of_its_level(level: str, bounds: tuple[float, float]) -> None:
    """IcePop's, TRL's and verl's; a bound that the job names stays. Truncation is at 2, as verl recommends."""
    asked = {"algorithm.importance_level": level}
    masked = make_job(**asked, **{"algorithm.importance": "mask"}).algorithm
    assert (masked.importance_low, masked.importance_high) == bounds
    bounded = make_job(**asked, **{"algorithm.importance": "mask", "algorithm.importance_high": 9.0}).algorithm
    assert (bounded.importance_low, bounded.importance_high) == (bounds[0], 9.0)
    truncated = make_job(**asked, **{"algorithm.importance": "truncate"}).algorithm
    assert (truncated.importance_low, truncated.importance_high) == (0.0, 2.0)


@pytest.mark.parametrize("importance", ["auto", "none", "truncate"])
def test_several_updates_a_step_need_the_policy_s_score_whatever_is_corrected(importance: str) -> None:
    updates = {"workload.mini_batch_size": 4, "algorithm.importance": importance}
    assert Role.POLICY in make_job(**updates).scored_roles
    assert Role.POLICY not in make_job(**{"algorithm.importance": importance}).scored_roles
    epochs = {"workload.num_epochs_per_step": 2, "algorithm.importance": importance}
    assert Role.POLICY in make_job(**epochs).scored_roles


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if AlgorithmSpec(name=name).weighs_rollouts])
def test_a_kl_in_the_rewards_is_the_trainer_s_whatever_the_number_of_updates(name: str) -> None:
    """Rewards are complete before the first update's own pass, so the policy is scored for one update too."""
    keys = {"algorithm.name": name, "algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1}
    for updates in ({}, {"workload.mini_batch_size": 4}, {"workload.num_epochs_per_step": 2}):
        assert Role.POLICY in make_job(**keys, **updates).scored_roles
        actions = [action.id for action in make_plan(**keys, **updates).schedule.step]
        assert actions.index("score/policy") < actions.index("compute_advantages")
    assert Role.POLICY not in make_job(**{**keys, "algorithm.kl_coef": 0.0}).scored_roles
    assert Role.POLICY not in make_job(**{**keys, "algorithm.kl_in": "loss"}).scored_roles


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not AlgorithmSpec(name=name).weighs_rollouts])
def test_without_rewards_of_tokens_there_is_no_kl_in_them(name: str) -> None:
    samples = {"": 8, "answer": 1, "unpaired": 2, "pair": 2}[ALGORITHMS[name].given]
    keys = {"algorithm.name": name, "workload.num_samples_per_prompt": samples, "workload.mini_batch_size": None}
    with pytest.raises(SpecError) as caught:
        make_job(**keys, **{"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1})
    if not ALGORITHMS[name].trains_scalar:  # those refuse kl_coef as well
        assert "from which a KL could be subtracted" in caught.value.what
        assert caught.value.way_out == "algorithm.kl_in=loss"
        make_job(**keys, **{"algorithm.kl_in": "loss", "algorithm.kl_coef": 0.1})
