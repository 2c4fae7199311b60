"""Overheads: the profile's constant and a share of the tensors."""

from rlplan.memory.machine.overheads import slack_bytes
from rlplan.spec.hardware.profile import SourcedBytes
from rlplan.vocabulary import Provenance


def test_slack_is_a_constant_and_one_percent_of_the_tensors() -> None:
    constant = SourcedBytes(value=1000, provenance=Provenance.MEASURED, source="by hand")
    assert slack_bytes(constant, 0) == 1000
    assert slack_bytes(constant, 12_300) == 1123
    assert slack_bytes(constant, 12_301) == 1124  # a need rounds up
