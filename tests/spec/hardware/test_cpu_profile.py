"""Hardware profiles: each value with its source, and no profile that is half right."""

from typing import Any

import pytest

from rlplan.errors import SpecError
from rlplan.spec.base import validate
from rlplan.spec.hardware.catalogue import get_profile
from rlplan.spec.hardware.profile import HardwareProfile, SourcedBytes
from rlplan.units import GIB
from tests.factories import make_profile


def sourced_values(profile: HardwareProfile) -> list[SourcedBytes]:
    parts = (profile, profile.process_overheads, profile.process_slack, profile.weight_packing)
    return [value for part in parts for _, value in part if isinstance(value, SourcedBytes)]


def test_every_value_of_the_cpu_host_is_plausible_and_says_where_it_comes_from() -> None:
    profile = get_profile("cpu-host", where="here")
    values = sourced_values(profile)
    assert len(values) == 1 + 7 + 4 + 3
    assert all(value.source and 0 < value.value <= 64 * GIB for value in values)
    assert all(value.provenance == "measured" for _, value in profile.process_overheads)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ({"kind": "tpu"}, "kind"),
        ({"memory": "16GiB"}, "memory"),
        ({"memory": {"value": "16G", "provenance": "measured", "source": "x"}}, "memory.value"),
        ({"memory": {"value": 1, "provenance": "guessed", "source": "x"}}, "memory.provenance"),
        ({"memory": {"value": 1, "provenance": "measured"}}, "memory.source"),
        ({"process_overheads": {}}, "process_overheads.policy_trainer"),
        ({"extra": 1}, "extra"),
        ({"schema_version": 2}, "schema_version"),
        ({"max_devices": 0}, "max_devices"),
    ],
)
def test_a_profile_with_a_mistake_is_refused_at_its_key(overrides: dict[str, Any], where: str) -> None:
    data = make_profile().model_dump(mode="json") | overrides
    with pytest.raises(SpecError) as caught:
        validate(HardwareProfile, data, file="profile.yaml")
    assert caught.value.where == f"profile.yaml: {where}"
