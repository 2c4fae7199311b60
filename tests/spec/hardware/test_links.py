"""Links of a job's hardware: the short form, and what is refused with all four parts."""

from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.spec.base import validate
from rlplan.spec.files.job_forms import expand_hardware
from rlplan.spec.parts.placement import HardwareSpec


def hardware(text: str) -> HardwareSpec:
    return validate(HardwareSpec, expand_hardware(text), file="job.yaml")


def test_a_link_is_typed_behind_the_two_groups() -> None:
    link = hardware("16xH100 + 64xL40S over 590Mb/s 40ms 0.1% 8 places 16 connections").link
    assert link is not None
    assert (link.bandwidth, link.latency_s, link.loss) == (73_750_000, 0.04, 0.001)
    assert (link.num_places, link.num_connections, link.fan_out) == (8, 16, "auto")


def test_without_a_link_nothing_changes() -> None:
    assert "link" not in expand_hardware("16xH100 + 64xL40S")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH100 + 8xL40S over 0Mb/s", "above zero"),
        ("8xH100 + 8xL40S over -5Mb/s", "a rate is"),
        ("8xH100 + 8xL40S over 1Gb/s 100%", "less than 1"),
        ("8xH100 + 8xL40S over 1Gb/s slowly", "bandwidth, then any of"),
        ("8xH100 + 8xL40S over 1Gb/s 9 places", "at most generation.num_devices = 8"),
        ("8xH100 over 1Gb/s", "link joins two groups"),
    ],
)
def test_links_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        hardware(text)
    error: Any = caught.value
    assert words in f"{error.what} {error.rule}"
    assert all((error.what, error.where, error.rule, error.way_out))
