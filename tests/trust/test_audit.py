"""The locked packages against a public database of holes, where one answers: `pip-audit` by PyPI's own JSON."""

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.factories import ROOT

PINNED = "pip-audit==2.10.1"
KNOWN = "requests==2.19.0"
"""A release with published holes (CVE-2018-18074): if the index reports none, it is not answering."""


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pip-audit in an environment of its own, for its packages are none of ours."""
    folder = tmp_path_factory.mktemp("audit")
    venv.create(folder, with_pip=True)
    install = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", PINNED]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "pip-audit"


def audit(tool: Path, requirements: Path) -> list[dict[str, Any]]:
    """Audit the requirements; return the report on each package."""
    command = [tool, "-s", "pypi", "--disable-pip", "--no-deps", "--progress-spinner=off", "-f", "json", "-r"]
    done = subprocess.run([*command, str(requirements)], capture_output=True, text=True, timeout=1200, check=False)
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        pytest.skip(f"NOT AUDITED: {done.stderr.strip()[-300:]}")
    return dependencies


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_no_locked_package_has_a_known_hole(tool: Path, lock: str, tmp_path: Path) -> None:
    """pip-audit ends well where the database knows no package at all: so it is first asked for a hole that there is."""
    (tmp_path / "known.txt").write_text(KNOWN + "\n")
    (known,) = audit(tool, tmp_path / "known.txt")
    if not known.get("vulns"):
        pytest.skip(
            f"NOT AUDITED: the index answers no question on holes ({known.get('skip_reason', 'it gives no reason')})"
        )
    packages = audit(tool, ROOT / "requirements" / lock)
    assert [package for package in packages if package.get("vulns") or "skip_reason" in package] == []
