"""Overheads with round numbers, which the tests of this folder share."""

import pytest

from rlplan.spec.base import validate
from rlplan.spec.hardware.profile import GpuOverheads


@pytest.fixture
def overheads() -> GpuOverheads:
    """Context 100, allocator 2, communicators 10 and 20 bytes."""
    sizes = {"context": 100, "allocator_granularity": 2, "communicator_of_two": 10, "communicator_of_many": 20}
    data = {key: {"value": size, "provenance": "assumed", "source": "made up"} for key, size in sizes.items()}
    return validate(GpuOverheads, data, file="profile.yaml")
