"""Whatever override is printed can be typed: each is read by the command line's own parser, for the spec it is of."""

import ast
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.planner.answers.explain import explain
from rlplan.planner.answers.plan_results import diff_choices, list_overrides
from rlplan.planner.checks.gpus import check_job
from rlplan.planner.machine import open_search
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.planner.setting import read_setting
from rlplan.spec.base import validate
from rlplan.spec.files.job_file import job_from, load_job, override_job
from rlplan.spec.files.yaml import apply_overrides
from rlplan.spec.job import JobSpec
from rlplan.spec.parts.training import Combination
from rlplan.spec.resolved import settle
from tests.emit.test_goldens import GOLDENS
from tests.factories import EXAMPLES, ROOT, gpu_job, job_data
from tests.planner.checks.test_trainers import REFUSED
from tests.repository.at_night import mark_nightly

LORA = "training.lora={rank: 8, target_modules: [q_proj, v_proj]}"
BUDGETS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "too small a card": ("Qwen/Qwen2.5-7B", "grpo", "1xRTX4090", ()),
    "too small a host": ("Qwen/Qwen2.5-7B", "grpo", "1xH100", ("hardware.host_memory=64GiB",)),
    "too small for adapters": ("Qwen/Qwen2.5-7B", "grpo", "1xRTX4090", (LORA, "training.zero_stage=3")),
    "one host": ("Qwen/Qwen2.5-7B", "grpo", "8xH100", ()),
    "all fixed": (
        "meta-llama/Llama-3.1-8B",
        "ppo",
        "2xL40S",
        (
            "training.zero_stage=2",
            "training.gradient_checkpointing=false",
            "training.offloads_optimizer=false",
            "workload.micro_batch_size_per_gpu=16",
            "rollout.tp=2",
            "rollout.kv_cache_memory=20GiB",
            "placement.placement=hybrid",
        ),
    ),
    "apart": ("meta-llama/Llama-3.1-8B", "grpo", "16xH100", ("placement.placement=disaggregated",)),
    "ahead": (
        "Qwen/Qwen2.5-1.5B",
        "ppo",
        "12xH100",
        ("placement.max_staleness=1", "roles.reward.path=Qwen/Qwen2.5-0.5B"),
    ),
    "experts": ("Qwen/Qwen3-30B-A3B", "grpo", "16xH100", ("rollout.quantization=auto",)),
    "preferences": ("meta-llama/Llama-3.1-8B", "dpo", "8xA100", ()),
}
FEW = ("too small a card", "all fixed", "preferences")
FOUND: dict[str, Plan] = {}


def found(name: str) -> Plan:
    """The budget of a case, found once."""
    if name not in FOUND:
        model, algorithm, gpus, overrides = BUDGETS[name]
        asked = {"policy": model, "algorithm": algorithm, "hardware": gpus}
        FOUND[name] = find_best_plan(job_from(asked, overrides), with_pareto=name == "one host")
    return FOUND[name]


def split_words(typed: dict[str, str]) -> str:
    return shlex.join(f"{key}={value}" for key, value in typed.items())


def find_overrides(text: str) -> list[str]:
    """Every KEY=VALUE of a sentence."""
    return [word.rstrip(",") for word in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)*=(?:\{[^}]*\}|\S+)", text)]


@pytest.mark.parametrize("name", mark_nightly(BUDGETS, but=FEW))
def test_what_was_chosen_and_what_came_next_lead_there_when_typed(name: str) -> None:
    plan = found(name)
    for layout in (plan, *plan.runners_up, *plan.pareto):
        whole = override_job(plan.asked, shlex.split(split_words(list_overrides(layout.choice, plan.job, plan.asked))))
        check_job(settle(whole), read_setting(settle(whole)))
    for other in (*plan.runners_up, *plan.pareto):
        override_job(plan.asked, shlex.split(diff_choices(other.choice, plan.choice, plan.job, plan.asked)))


@pytest.mark.parametrize("name", mark_nightly(BUDGETS, but=FEW))
def test_every_remedy_makes_the_job_fit_when_it_is_typed(name: str) -> None:
    plan = found(name)
    for remedy in plan.remedies:
        after = open_search(override_job(plan.asked, shlex.split(remedy.change))).run(with_others=False)
        assert (after.fits, after.verdict) == (True, remedy.verdict), remedy.change


def test_adapters_with_and_without_a_base_in_4_bits_are_remedies_where_they_fit() -> None:
    remedies = [remedy.change for remedy in found("too small a card").remedies]
    assert "training.lora='{rank: 16, base_dtype: nf4}'" in remedies
    remedies = [remedy.change for remedy in found("too small a host").remedies]
    assert {"training.lora='{rank: 64}'", "training.lora='{rank: 64, base_dtype: nf4}'"} <= set(remedies)


def test_a_job_too_long_for_a_card_is_mended_by_small_adapters_and_shorter_responses_together() -> None:
    answers = {"policy": "Qwen/Qwen2.5-7B", "hardware": "1xRTX4090"}
    plan = find_best_plan(job_from(answers, ["workload.max_response_len=30000", "hardware.host_memory=64GiB"]))
    last = next(remedy for remedy in plan.remedies if "workload.max_response_len=" in remedy.change)
    assert last.change.startswith("training.lora='{rank: 16, base_dtype: nf4}' workload.max_response_len=")
    assert last.learns_less == "trains adapters only, on 4-bit weights, truncates longer responses"
    assert find_best_plan(override_job(plan.asked, shlex.split(last.change))).verdict is last.verdict


def test_fixed_choices_of_which_none_helps_alone_are_changed_together_and_no_more_of_them_than_needed() -> None:
    plan = found("all fixed")
    assert plan.remedies
    for remedy in plan.remedies:
        words = shlex.split(remedy.change)
        assert len(words) > 1
        assert not remedy.learns_less
        for word in words:
            rest = [other for other in words if other != word]
            assert not open_search(override_job(plan.asked, rest)).run(with_others=False).fits, rest


def test_the_settings_of_the_shipped_example_are_a_remedy_for_the_same_card() -> None:
    """examples/grpo-lora-8b-1xrtx4090.yaml: adapters on a 4-bit base, and an engine with fp8 weights."""
    plan = find_best_plan(job_from({"policy": "Qwen/Qwen3-8B", "hardware": "1xRTX4090"}))
    changes = [remedy.change for remedy in plan.remedies[:3]]
    assert "training.lora='{rank: 64, base_dtype: nf4}' rollout.quantization=fp8" in changes or (
        "rollout.quantization=fp8 training.lora='{rank: 64, base_dtype: nf4}'" in changes
    )


def test_what_costs_nothing_in_learning_comes_first_and_shorter_responses_last() -> None:
    for name in ("too small a card", "too small a host"):
        ranks = [(remedy.verdict.rank, remedy.effect) for remedy in found(name).remedies]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", mark_nightly(("all fixed", "too small a card", "apart"), but=("all fixed",)))
def test_every_question_of_an_explanation_can_be_typed(name: str) -> None:
    plan = found(name)
    explanation = explain(plan, more_devices=True)
    for outcome in (*explanation.families, *explanation.what_ifs, *explanation.asked):
        typed = shlex.split(outcome.change.typed)
        override_job(plan.asked, typed)
        if outcome.way_out:
            override_job(plan.asked, [*typed, *shlex.split(outcome.way_out)])
    for other in explanation.runners_up:
        override_job(plan.asked, shlex.split(other.differs))


@pytest.mark.parametrize("path", sorted((GOLDENS / "plans").glob("*.json")), ids=lambda path: path.stem)
def test_plans_of_the_examples_are_said_in_keys_of_a_budget(path: Any) -> None:
    golden, spec = json.loads(path.read_text("utf-8")), load_job(EXAMPLES / f"{path.stem}.yaml")
    assert golden["runners_up"]
    for runner_up in golden["runners_up"]:
        override_job(spec, shlex.split(runner_up["differs"]))


@pytest.mark.parametrize(("model", "gpus", "overrides", "where", "words"), REFUSED)
def test_the_way_out_of_a_refused_budget_is_made_of_its_keys(
    model: str, gpus: str, overrides: tuple[str, ...], where: str, words: str
) -> None:
    def check() -> None:
        spec = gpu_job({"policy": model, "hardware": gpus}, overrides)
        check_job(spec, read_setting(spec))

    with pytest.raises(SpecError) as caught:
        check()
    try:
        long = JobSpec.expand_short_forms({"policy": model, "hardware": gpus})
    except SpecError:
        return  # the short form itself is refused
    refused = apply_overrides(long, overrides)
    for override in find_overrides(caught.value.way_out):
        _read(refused, override)


COMBINED = [
    Combination(stage, optimizer, adapters, packed, *offloads, *ranks)
    for stage, optimizer, (adapters, packed), offloads, ranks in product(
        (None, 0, 1, 2, 3),
        ("adamw", "adamw_8bit"),
        ((False, False), (True, False), (True, True)),
        product((False, True), repeat=2),
        ((1, 1), (2, 1), (1, 2), (2, 2)),
    )
]


def test_what_deepspeed_does_not_combine_has_a_way_out_for_jobs_and_for_budgets() -> None:
    ways_out = {contradiction.way_out for asked in COMBINED for contradiction in asked.contradictions()}
    assert len(ways_out) > 3
    for way_out in ways_out:
        (override,) = find_overrides(way_out)
        _read(job_data(), override)
        _read({"policy": "Qwen/Qwen2.5-7B", "hardware": "8xH100"}, override)


def _read(data: Any, override: str) -> None:
    """Raises: SpecError where a key is unknown or a value is none of its own."""
    try:
        validate(JobSpec, apply_overrides(JobSpec.expand_short_forms(data), [override]), file="command line")
    except SpecError as error:
        if "agree with each other" not in error.rule:  # the other value of a pair is missing here
            raise


def test_no_message_names_a_key_that_neither_a_job_nor_a_budget_has() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}: {key}"
        for folder in ("rlplan", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for key in _printed_keys(path.read_text("utf-8"))
        if not _has_key(JobSpec, key.split("."))
    ]
    assert unknown == []


def _printed_keys(text: str) -> Iterator[str]:
    """Dotted keys with `=` behind them in the strings of a module, where their first part is one of a job or budget."""
    parts = set(JobSpec.model_fields)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            keys = re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)=", node.value)
            yield from (key for key in keys if key.partition(".")[0] in parts)


def _has_key(kind: Any, keys: Sequence[str]) -> bool:
    field = getattr(kind, "model_fields", {}).get(keys[0])
    if field is None or len(keys) == 1:
        return field is not None
    inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return any(_has_key(value, keys[1:]) for value in inner)
