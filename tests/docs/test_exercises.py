"""docs/exercises.md and the suggested settings: every number is made again; what a hand can sum up is summed here."""

import csv
import re

import pytest

from benchmarks import suggest_settings
from benchmarks.exercises.page import MARKED, PAGE, PARTS
from benchmarks.exercises.plans import example
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.vocabulary import MemoryKind
from tests.docs.documentation import read

TEXT = read(PAGE)
PRINTED = {name: part.strip() for name, part in MARKED.findall(TEXT)}
SUGGESTED = {
    (row["gpu"], row["size"], row["training"]): row
    for row in csv.DictReader(suggest_settings.CSV.read_text("utf-8").splitlines())
}
SLOW = ("placed", "placed-answer", "handed", "handed-answer", "design-frameworks")
SAMPLE = (("rtx-4090", "7B", "QLoRA"), ("h100-sxm", "14B", "full"))
MORE = (("rtx-4090", "70B", "full"), ("a100-sxm-40gb", "7B", "LoRA"), ("h200-sxm", "32B", "LoRA"))


def cells(part: str) -> list[list[str]]:
    """The rows of a part's table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in PRINTED[part].splitlines()[2:]]


def plan(name: str, *overrides: str) -> Plan:
    answer = example(name, *overrides)
    assert isinstance(answer, Plan), answer
    return answer


def test_every_part_stands_on_the_page_once() -> None:
    assert sorted(PRINTED) == sorted(PARTS)
    assert len(re.findall("<!-- begin ", TEXT)) == len(PARTS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in SLOW else name for name in PARTS]
)
def test_the_page_says_what_the_library_says(name: str) -> None:
    assert PRINTED[name] == PARTS[name]().strip()


def test_prose_outside_the_marks_has_no_number_of_its_own() -> None:
    """But what the questions are about: sizes, counts of GPUs, and the sums of the tables that are quoted."""
    allowed = {"70", "8", "32", "140", "10", "64", "7", "80", "560", "4", "14", "28", "92", "30", "3", "1", "2", "3.1"}
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", MARKED.sub("", TEXT))
    assert set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?", prose)) <= allowed


# Worked by hand: Llama-3.1-70B has 70,553,706,496 parameters, its head 128,256 x 8,192; Llama-2-7B has 6,738,415,616.


def test_states_of_four_models_of_70b_are_those_of_a_hand_calculation() -> None:
    policy, head = 70_553_706_496, 128_256 * 8_192
    value = policy - head + 8_192
    weights, trained = 2 * 2 * (policy + value), 14 * (policy + value)
    sizes = [f"{size / 1e9:,.1f} GB" for size in (weights, trained, weights + trained)]
    assert [row[1] for row in cells("states")[:3]] == sizes


def test_ten_seconds_for_140_gb_are_14_gb_a_second() -> None:
    assert cells("links")[0][1] == "14.0 GB/s"
    nvlink = next(row for row in cells("links") if row[0].startswith("NVLink"))
    assert nvlink[1:] == ["450.0 GB/s", "311 ms", "3.1%"]


def test_adam_of_7b_takes_54_gb_and_not_28() -> None:
    assert f"{8 * 6_738_415_616 / 1e9:.1f} GB, not 28" in PRINTED["left-out-answer"]


def test_what_is_left_out_is_the_difference() -> None:
    number = {"-": 0.0}
    for _, quoted, here, left_out in cells("left-out"):
        told_gb = number.get(quoted) if quoted in number else float(quoted.split()[0])
        assert float(here.split()[0].replace(",", "")) - (told_gb or 0.0) == pytest.approx(
            float(left_out.split()[0].replace(",", "")), abs=0.11
        )


def test_four_models_of_70b_do_not_fit_on_eight_cards() -> None:
    assert cells("placed")[0][4] == Verdict.DOES_NOT_FIT.value


def test_a_step_of_the_design_is_the_sum_of_its_phases() -> None:
    design = plan("ppo-70b-64xh100")
    assert sum(cost.seconds for cost in design.costs.values()) == pytest.approx(design.seconds)
    assert sum(size for _, _, _, size in design.binding.rows) == design.binding.num_bytes


def test_adapters_and_no_value_model_need_less_than_ppo_with_all_weights() -> None:
    states = (MemoryKind.GRADIENTS, MemoryKind.MASTER_WEIGHTS, MemoryKind.OPTIMIZER)

    def sum_states(plan: Plan) -> int:
        return sum(size for _, _, kind, size in plan.ledger.device_peak("cuda:0").rows if kind in states)

    lora = plan("exercises/grpo-7b", "training.lora={rank: 64}", "training.offloads_optimizer=false")
    full = plan("exercises/ppo-7b", "training.offloads_optimizer=false")
    assert lora.verdict is Verdict.FITS
    assert sum_states(lora) < 0.1 * sum_states(full)


@pytest.mark.parametrize("key", [*SAMPLE, *(pytest.param(key, marks=pytest.mark.nightly) for key in MORE)], ids=str)
def test_a_suggested_setting_is_the_plan_of_today(key: tuple[str, str, str]) -> None:
    again = suggest_settings.as_csv([suggest_settings.suggest(*key)])
    assert next(csv.DictReader(again.splitlines())) == SUGGESTED[key]


def test_the_table_of_suggestions_has_a_row_for_every_question() -> None:
    assert list(SUGGESTED) == list(suggest_settings.keys())
    page = read(suggest_settings.PAGE)
    assert all(f"## {gpu} (" in page for gpu in suggest_settings.GPUS)


def test_a_larger_card_never_needs_more_gpus() -> None:
    order = ("a100-sxm-40gb", "a100-sxm-80gb")
    for size in suggest_settings.MODELS:
        for training in suggest_settings.TRAINING_OVERRIDES:
            small, large = (SUGGESTED[(gpu, size, training)] for gpu in order)
            if small["verdict"] == Verdict.FITS.value:
                assert large["verdict"] == Verdict.FITS.value
                assert int(large["num_gpus"]) <= int(small["num_gpus"])


def test_what_is_suggested_fits_and_leaves_the_engine_within_its_card() -> None:
    for row in SUGGESTED.values():
        if row["verdict"] == Verdict.FITS.value:
            assert 0 < float(row["gpu_memory_utilization"]) <= 1
            assert int(row["kv_cache_memory_bytes"]) > 0
            assert float(row["step_s"]) > 0
