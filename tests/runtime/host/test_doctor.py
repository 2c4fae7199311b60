"""The doctor's words on sandboxes: one that passes is enough, and the others are listed."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from rlplan.errors import HostError
from rlplan.runtime.host import doctor
from rlplan.runtime.host.finding import Finding


@pytest.fixture
def sandboxes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Findings when the named sandboxes pass their test."""

    def found(*passing: str) -> dict[str, Finding]:
        monkeypatch.setattr(doctor, "open_sandbox", lambda name, num_slots: opened(name, passing))
        return {each.subject.removeprefix("sandbox: "): each for each in doctor._sandboxes()}

    return found


def opened(name: str, passing: Collection[str]) -> Any:
    if name not in passing:
        raise HostError(f"{name} does not start", where="this host", rule="it must", way_out=f"install {name}")
    return SimpleNamespace(cannot_hold="the clock", close=lambda: None)


def test_a_sandbox_that_fails_beside_one_that_passes_is_no_warning(sandboxes: Any) -> None:
    findings = sandboxes("sandlock")
    assert findings["sandlock"].found == "passes its test; does not contain: the clock"
    other = findings["bubblewrap"]
    assert (other.state, other.found, other.fix) == ("ok", "not available: bubblewrap does not start", "")


def test_where_no_sandbox_passes_each_is_a_warning_with_its_way_out(sandboxes: Any) -> None:
    for name, each in sandboxes().items():
        assert (each.state, each.found) == ("warning", f"{name} does not start")
        assert each.fix == f"needed for code_executor only: install {name}"


@pytest.mark.parametrize(("torch", "state"), [("2.13.0+cu130", "ok"), ("2.11.0+cu130", "ok"), ("2.10.0", "warning")])
def test_every_checked_version_of_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, torch: str, state: str) -> None:
    versions = {**doctor.REQUIRED_PACKAGES, "torch": torch, "vllm": "0.32.0"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: versions.get(name) or "1.0")
    findings = {finding.subject: finding for finding in doctor._packages("vllm")}
    assert (findings["torch"].state, findings["torch"].found) == (state, torch)
