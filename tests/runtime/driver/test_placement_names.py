"""A placement is a schedule: whoever plays one need not know its name."""

import re

from rlplan.vocabulary import Placement
from tests.factories import ROOT

RUNTIME = ROOT / "rlplan" / "runtime"
NAMES = re.compile("|".join([r"\bPlacement\.", *(rf"\b{placement}\b" for placement in Placement)]))


def test_nothing_in_the_runtime_but_its_launch_names_a_placement() -> None:
    sources = [path for path in RUNTIME.rglob("*.py") if path != RUNTIME / "launch.py"]
    assert len(sources) > 50
    assert [str(path) for path in sources if NAMES.search(path.read_text("utf-8"))] == []
