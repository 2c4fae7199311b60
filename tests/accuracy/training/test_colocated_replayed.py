"""Updates of AgileRL, replayed: what NVML showed more in an update than before it, on the rig's own measurements."""

from typing import Any

import pytest

from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.training.colocated import (
    RESIDUAL,
    is_replayed,
    kinds_of,
    replayed_bytes,
    stored_tensors,
    within_device,
)
from rlplan.accuracy.training.run import Run, read_run
from rlplan.accuracy.training.settings import RunSettings
from rlplan.memory.trainers.replay.attention import Way
from rlplan.units import GIB, MIB
from rlplan.vocabulary import MemoryKind

RIG = {point.id: point for point in bundled_points() if point.id.startswith("agilerl-")}
ROWS = 441
"""256 MiB of fp32 logits over 151,936 words; 1,365 over SmolLM2's 49,152."""


def run_of(name: str, **settings: Any) -> Run:
    point = RIG[f"agilerl-{name}"]
    return read_run(MeasuredPoint.model_validate(point.model_dump() | {"settings": point.settings | settings}))


def grown(name: str) -> float:
    """MiB between the peak and what was there before."""
    point = RIG[f"agilerl-{name}"]
    return (float(str(point.measured.value)) - RunSettings(point).number(RESIDUAL, 0.0)) * 1024


def replayed(name: str, rows: int = ROWS) -> float:
    held = replayed_bytes(run_of(name), rows)
    assert held is not None
    return sum(held.values()) / MIB


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("smollm2-1.7b-l4-s512-mb8-g4-r8-u450", 1365),
        ("smollm2-1.7b-l4-s4096-mb8-g4-r64-u450", 1365),
        ("qwen2.5-0.5b-a100-s512-mb1-g4-r64-u200", 441),
        ("qwen2.5-0.5b-a100-s4096-mb8-g4-r64-u200", 441),
        ("qwen2.5-1.5b-a100-s512-mb8-g4-r8-u200", 441),
        ("smollm2-1.7b-l4-s4096-mb8-g16-r8-u450", 1365),  # with a mask, and so is the last
        ("qwen2.5-0.5b-a100-s32768-mb1-g4-r8-u200", 441),
        ("qwen2.5-1.5b-a100-s2048-mb8-g4-r16-u200", 441),
        ("qwen2.5-1.5b-a100-s4096-mb8-g4-r8-u200", 441),
        ("qwen2.5-1.5b-l4-s4096-mb8-g4-r64-u450", 441),
        ("qwen2.5-7b-a100-s512-mb1-g4-r8-u550", 441),
        ("qwen2.5-7b-a100-s4096-mb8-g4-r8-u550", 441),
    ],
)
def test_an_update_grows_by_what_the_replay_reserves_within_30_mebibytes(name: str, rows: int) -> None:
    assert replayed(name, rows) == pytest.approx(grown(name), abs=30)


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("512-mb1-g4-r64-u330-attn", 30),
        ("512-mb8-g4-r8-u327-attn", 30),
        ("512-mb8-g16-r8-u345-attn", 30),
        ("1024-mb4-g8-r16-u344-attn", 30),
        ("2048-mb2-g8-r32-u366-attn", 100),
        ("2048-mb8-g4-r16-u343-attn", 220),
        ("4096-mb1-g4-r8-u363-attn", 250),
        ("4096-mb8-g4-r64-u367-attn", 290),
        ("512-mb8-g4-r64-u450", 60),  # sampled, as the rest, with Liger's kernels and masks
        ("1024-mb4-g8-r16-u450", 40),
        ("4096-mb8-g4-r8-u450", 100),
    ],
)
def test_an_update_of_gemma_4_grows_by_what_its_layers_take_one_by_one(name: str, within: int) -> None:
    name = f"gemma-4-e2b-it-a100-s{name}"
    assert replayed(name, 256) == pytest.approx(grown(name), abs=within)


def test_a_full_device_has_its_free_segments_given_back() -> None:
    """40,170 MiB of 40,960 were in use where the replay would reserve more than there is."""
    point = RIG["agilerl-gemma-4-e2b-it-a100-s4096-mb8-g16-r64-u493-attn"]
    held = replayed_bytes(run_of("gemma-4-e2b-it-a100-s4096-mb8-g16-r64-u493-attn"), 256)
    assert held is not None
    assert sum(held.values()) / MIB > 40_900
    capped = within_device(point, held, 1360 * MIB)
    assert sum(capped.values()) == 40_960 * MIB
    assert (
        within_device(point, held | {MemoryKind.WEIGHTS: GIB}, 0)[MemoryKind.FRAGMENTATION]
        == held[MemoryKind.FRAGMENTATION]
    )


def test_liger_s_kernels_came_to_gemma_4_after_agilerl_2_8_0() -> None:
    older = run_of("gemma-4-e2b-it-a100-s512-mb1-g4-r8-u327-attn")
    newer = run_of("gemma-4-e2b-it-a100-s4096-mb8-g4-r8-u450")
    assert (kinds := kinds_of(older)) is not None
    assert not kinds.has_liger
    assert {kind.way for kind in kinds.layers} == {Way.MASKED, Way.SCORES}  # 512 tokens are more than the window has
    assert (kinds := kinds_of(newer)) is not None
    assert kinds.has_liger
    assert {kind.way for kind in kinds.layers} == {Way.MASKED}
    assert [kind.keys_of for kind in kinds.layers][:18] == [None] * 15 + [13, 13, 13]
    fixed = kinds_of(run_of("gemma-4-e2b-it-a100-s512-mb1-g4-r8-u327-attn", transformers="5.19.0"))
    assert fixed is not None
    assert {kind.way for kind in fixed.layers} == {Way.MASKED, Way.EFFICIENT}


def test_responses_are_of_one_length_where_the_rig_held_them_to_it() -> None:
    """From AgileRL's commit c02e7ac8 on no response ends before the limit; in older files some may have."""
    sampled = {point.model for point in RIG.values() if str(point.settings.get("completion")).startswith("sampled")}
    assert {str(model).rsplit("/")[-1] for model in sampled} == {
        *("SmolLM2-1.7B-Instruct", "Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct"),
        "gemma-4-E2B-it",
    }
    held = [point for point in RIG.values() if str(point.settings.get("completion")).startswith("pinned")]
    assert len(held) == 72
    assert all(point.source.endswith((".pinned.json", "A100-SXM4-40GB.json", "L4.json")) for point in held)


@pytest.mark.parametrize("gpu", ["a100", "l4"])
def test_the_tile_that_0_5b_reserves_twice_from_the_second_step_on_is_met(gpu: str) -> None:
    name = f"qwen2.5-0.5b-{gpu}-s1024-mb4-g8-r16-u200"
    assert replayed(name) == pytest.approx(grown(name), abs=30)
    alone = replayed_bytes(run_of(name, group_size=4), ROWS)  # one step
    assert alone is not None
    assert replayed(name) - sum(alone.values()) / MIB == 256  # 441 rows of 151,936 words in fp32


def test_stored_tensors_are_the_model_s_with_two_sets_of_adapters_in_fp32() -> None:
    run = run_of("qwen2.5-0.5b-a100-s512-mb1-g4-r64-u200")
    assert run.adapters is not None
    trained = sum(adapter.numel for adapter in run.adapters.parameters)
    assert sum(stored_tensors(run)) == 2 * run.model.num_parameters + 2 * 4 * trained


def test_a_base_in_four_bits_is_smaller_and_its_update_takes_more() -> None:
    name = "qwen2.5-0.5b-a100-s4096-mb8-g16-r8-nf4-u200"
    four, plain = replayed_bytes(run_of(name), ROWS), replayed_bytes(run_of(name, quant="none"), ROWS)
    assert four is not None
    assert plain is not None
    assert four[MemoryKind.WEIGHTS] < plain[MemoryKind.WEIGHTS]
    assert four[MemoryKind.WEIGHTS] > 151_936 * 896 * 4  # the table alone
    assert four[MemoryKind.ACTIVATIONS] - plain[MemoryKind.ACTIVATIONS] > GIB


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("olmoe-1b-7b-0924-a100-s512-mb1-g4-r8-u428", {}),
        ("gemma-4-e2b-it-a100-s512-mb1-g4-r8-u450", {"quant": "nf4"}),
    ],
)
def test_experts_and_wide_heads_over_four_bits_are_not_replayed(name: str, settings: dict[str, str]) -> None:
    assert not is_replayed(run_of(name, **settings))
    assert replayed_bytes(run_of(name, **settings), ROWS) is None
