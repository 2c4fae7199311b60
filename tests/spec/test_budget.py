"""Budgets: what is asked for on GPUs, from a command line or a file."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.spec.budget import BudgetSpec, load_budget, make_budget

ASKED = {"model": "Qwen/Qwen2.5-7B", "gpus": "8xH100"}


def test_a_command_line_is_a_whole_budget() -> None:
    budget = make_budget({**ASKED, "algorithm": None}, ["workload.max_response_len=4096", "training.zero_stage=3"])
    assert budget.algorithm == "grpo"
    assert budget.workload.max_seq_len == 1024 + 4096
    assert budget.training.zero_stage == 3


@pytest.mark.parametrize(
    ("algorithm", "kl_coef", "lora", "is_held"),
    [
        ("grpo", None, None, True),
        ("grpo", 0.0, None, False),
        ("dapo", None, None, False),
        ("dapo", 0.01, None, True),
        ("grpo", None, {"rank": 8}, False),
    ],
)
def test_a_reference_is_held_where_something_is_compared_with_it(
    algorithm: str, kl_coef: float | None, lora: dict[str, int] | None, is_held: bool
) -> None:
    answers = {**ASKED, "algorithm": algorithm, "kl_coef": kl_coef, "training": {"lora": lora}}
    assert make_budget(answers).has_reference is is_held


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text("{}")
    (tmp_path / "budget.yaml").write_text("model: shape.json\ngpus: 1xh100\nvalue_model: Qwen/Qwen3-8B\n")
    budget = load_budget(tmp_path / "budget.yaml")
    assert (budget.model, budget.value_model) == (str(tmp_path / "shape.json"), "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "grpoo"}, "Did you mean 'grpo'?"),
        ({"workload": {"num_samples_per_prompt": 1}}, "must be at least 2"),
        ({"workload": {"mini_batch_size": 1000}}, "must be a multiple of mini_batch_size = 1000"),
        ({"workload": {"mini_batch_size": 1}}, "1024 optimizer steps"),
        ({"workload": {"max_tokens_per_micro_batch": 100}}, "must hold one longest sequence"),
        (
            {"workload": {"max_tokens_per_micro_batch": 9999, "micro_batch_size_per_gpu": 2}},
            "micro_batch_size_per_gpu or max_tokens_per_micro_batch, not both",
        ),
        ({"workload": {"mean_prompt_len": 2000}}, "is more than max_prompt_len = 1024"),
        ({"workload": {"micro_batch_size_per_gpu": 0}}, "micro_batch_size_per_gpu"),
        ({"rollout": {"tp": 0}}, "tp"),
        ({"rollout": {"kv_cache_memory": "80G"}}, "kv_cache_memory"),
        ({"training": {"zero_stage": 4}}, "zero_stage"),
        ({"training": {"zero_stag": 3}}, "Did you mean 'zero_stage'?"),
        ({"placement": {"generation_share": 1.0}}, "generation_share"),
        ({"gpus": ""}, "gpus"),
    ],
)
def test_a_broken_budget_is_refused_with_its_rule(change: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_budget({**ASKED, **change})
    assert words in str(caught.value)


def test_a_budget_comes_back_from_json_as_it_was() -> None:
    budget = make_budget(ASKED, ["workload.response_lengths={kind: lognormal, median: 500, sigma: 1}"])
    assert BudgetSpec.model_validate_json(budget.model_dump_json()) == budget
