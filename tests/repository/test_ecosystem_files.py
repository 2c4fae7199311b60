"""Files that people expect in a repository: CI, pre-commit hooks, issue templates, a citation.

Left out: whether the services that read them accept them, which only these services can say.
"""

import re
from typing import Any

from rlplan.spec.files.yaml import read_yaml
from rlplan.version import __version__
from tests.docs.documentation import ROOT, read


def load(path: str) -> dict[str, Any]:
    content: dict[str, Any] = read_yaml(ROOT / path, path)
    return content


def test_continuous_integration_runs_the_command_of_the_project() -> None:
    jobs = load(".github/workflows/ci.yml")["jobs"]
    commands = {step.get("run") for job in jobs.values() for step in job["steps"]}
    assert {".ci/run", "make site"} <= commands
    assert all("timeout-minutes" in job for job in jobs.values())


def test_hooks_call_programs_of_the_environment_that_make_builds() -> None:
    hooks = [hook for repository in load(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    assert {hook["id"] for hook in hooks} >= {"ruff-format", "ruff-check", "lint-imports"}
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)


def test_every_issue_template_asks_for_the_machine() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")):
        body = load(path.relative_to(ROOT).as_posix())["body"]
        asked = " ".join(field["attributes"].get("description", "") for field in body)
        assert "rlplan doctor --json" in asked, path.name


def test_the_citation_names_this_release() -> None:
    assert str(load("CITATION.cff")["version"]) == __version__
    assert re.search(rf"^## \[{re.escape(__version__)}\] - ", read(ROOT / "CHANGELOG.md"), re.MULTILINE)
