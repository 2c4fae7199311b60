"""Rules of thumb beside our formulas: worked by hand, and worse than ours on every source of training."""

import re
from statistics import median

import pytest

from benchmarks.constants.rules_of_thumb import RULES, rule_of_thumb
from rlplan.accuracy.compare import Comparison, relative_error
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from tests.accuracy.bundled import bundled_report

POINTS = {point.id: point for point in bundled_points()}


def value(point: MeasuredPoint) -> float:
    answer = rule_of_thumb(point)
    assert answer is not None
    return float(str(answer.value))


def test_a_peak_is_states_and_a_layer_s_tokens() -> None:
    """Qwen2.5 0.5B, adapters of rank 64 beside all linear layers, four responses of 512 tokens, recomputed."""
    point = POINTS["agilerl-qwen2.5-0.5b-l4-s512-mb8-g4-r64-u200"]
    layer = 64 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)
    states = 2 * 494_032_768 + 16 * 24 * layer
    assert value(point) == pytest.approx((states + 4 * 512 * 896 * (34 + 2 * 24)) / 2**30)


def test_an_engine_asleep_is_a_context() -> None:
    assert value(POINTS["agilerl-qwen2.5-0.5b-l4-s512-mb1-g4-r8-u200-asleep"]) == 0.5


def test_a_kind_without_a_rule_has_no_answer() -> None:
    assert rule_of_thumb(next(point for point in POINTS.values() if point.kind == "vllm_kv")) is None


@pytest.mark.parametrize("kind", RULES)
def test_formulas_err_by_less_than_rules_of_thumb_on_every_source(kind: str) -> None:
    ours: dict[str, list[float]] = {}
    rules: dict[str, list[float]] = {}
    for point in bundled_report().points:
        answer = rule_of_thumb(POINTS[point.id]) if point.kind == kind else None
        error = relative_error(POINTS[point.id], answer) if answer else None
        if error is not None and point.relative_error is not None:
            source = find_source(point)
            ours.setdefault(source, []).append(abs(point.relative_error))
            rules.setdefault(source, []).append(abs(error))
    assert {source for source in ours if median(ours[source]) >= median(rules[source])} == set()


def find_source(point: Comparison) -> str:
    match = re.match(r"[a-z0-9]+", point.id)
    assert match is not None
    return match.group()
