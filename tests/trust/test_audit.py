"""The locked packages against a public database of holes, where one answers: `pip-audit` by PyPI's own JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.factories import ROOT

KNOWN = "requests==2.19.0"
"""A release with published holes (CVE-2018-18074): where none is told of it, nobody answers."""


def audited(requirements: Path) -> list[dict[str, Any]]:
    """What is said of each package. Skips where pip-audit is not installed."""
    tool = shutil.which("pip-audit") or shutil.which("pip-audit", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("NOT AUDITED: pip-audit is not installed (it is not in the locks: pip install pip-audit)")
    command = [tool, "-s", "pypi", "--disable-pip", "--no-deps", "--progress-spinner=off", "-f", "json", "-r"]
    done = subprocess.run([*command, str(requirements)], capture_output=True, text=True, timeout=1200, check=False)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        pytest.skip(f"NOT AUDITED: {done.stderr.strip()[-300:]}")
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_no_locked_package_has_a_known_hole(lock: str, tmp_path: Path) -> None:
    """pip-audit ends well where the database knows no package at all: so it is first asked for a hole that there is."""
    (tmp_path / "known.txt").write_text(KNOWN + "\n")
    (known,) = audited(tmp_path / "known.txt")
    if not known.get("vulns"):
        pytest.skip(f"NOT AUDITED: the index answers no question on holes ({known.get('skip_reason', 'none is told')})")
    packages = audited(ROOT / "requirements" / lock)
    assert [package for package in packages if package.get("vulns") or "skip_reason" in package] == []
