"""The result: what is worked out of it, and that it survives a file."""

import json

import pytest

from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import Asynchrony
from tests.simulate.cases import make_setting, make_work, uniform


def a_result() -> SimulationResult:
    return simulate(make_setting(make_work(lengths=uniform(1, 200)), Asynchrony(1, True, 4), num_steps=20))


def test_it_comes_back_from_json_as_it_was() -> None:
    result = a_result()
    assert SimulationResult.parse(json.loads(json.dumps(result.as_json()))) == result


def test_another_schema_version_is_refused() -> None:
    with pytest.raises(ValueError, match="schema version 99"):
        SimulationResult.parse({**a_result().as_json(), "schema_version": 99})


def test_quantiles_are_steps_that_happened() -> None:
    result = a_result()
    ranked = sorted(result.step_s)
    assert (result.step_quantile_s(0.5), result.step_quantile_s(0.95)) == (ranked[9], ranked[18])
    assert result.as_json()["mean_step_s"] == pytest.approx(sum(ranked) / 20)


def test_the_mean_staleness_weighs_tokens() -> None:
    result = a_result()
    total = sum(age * count for age, count in result.token_staleness.items())
    assert result.mean_staleness == pytest.approx(total / result.num_trained_tokens)


def test_the_trace_holds_the_first_steps_only() -> None:
    result = simulate(make_setting(num_steps=9, num_traced_steps=2))
    assert {span.step for span in result.trace.spans} == {1, 2}
    assert result.trace.origin == "predicted"
