"""A number out of its limits is answered with what is allowed and the nearest value that is, which then is taken."""

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from rlplan.errors import SpecError
from rlplan.spec.base import Spec, validate
from rlplan.spec.files.job_file import load_job
from tests.factories import EXAMPLES

JOB = EXAMPLES / "grpo-7b-8xh100.yaml"


class Inner(Spec):
    even: int = Field(default=2, ge=0, lt=9, multiple_of=2)
    open: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = "auto"
    any_of: tuple[Annotated[int, Field(ge=3)], ...] = ()


class Outer(Spec):
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("key", "value", "way_out"),
    [
        ("even", 7, "from 0 to below 9, a multiple of 2: for example inner.even=8"),
        ("even", 11, "from 0 to below 9, a multiple of 2: for example inner.even=8"),
        ("even", -3, "from 0 to below 9, a multiple of 2: for example inner.even=0"),
        ("open", 0.0, "above 0 and below 1: for example inner.open=0.01"),
        ("open", 5, "above 0 and below 1: for example inner.open=0.99"),
        ("any_of", [5, 1], "3 or more: for example 3"),
    ],
)
def test_the_way_out_says_what_is_allowed_and_the_nearest(key: str, value: Any, way_out: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(Outer, {"inner": {key: value}}, file="outer.yaml")
    assert caught.value.way_out == way_out


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ("workload.temperature=0", "from 0.01"),
        ("workload.num_steps=100000000", "from 1 to 10000000"),
        ("rollout.num_engines=0", "from 1 to 16384"),
        ("rollout.speculative_tokens=17", "from 0 to 16"),
        ("algorithm.learning_rate=-0.1", "0 or more"),
        ("placement.max_staleness=-1", "from 0"),
    ],
)
def test_a_jobs_way_out_can_be_typed(wrong: str, allowed: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_job(JOB, [wrong])
    assert caught.value.way_out.startswith(allowed)
    typed = re.findall(r"for example (\S+)$", caught.value.way_out)
    assert typed, caught.value.way_out
    load_job(JOB, typed)
