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


def test_workflows_and_images_name_what_they_use_by_its_hash() -> None:
    used = [
        step["uses"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in load(path.relative_to(ROOT).as_posix())["jobs"].values()
        for step in job["steps"]
        if "uses" in step
    ]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), used
    bases = [line for name in ("Dockerfile", "Dockerfile.gpu") for line in read(ROOT / name).splitlines()]
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", line) for line in bases if line.startswith("FROM "))


def test_a_release_is_audited_and_signed_with_its_bill_of_materials() -> None:
    job = load(".github/workflows/release.yml")["jobs"]["build"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[:2] == ["make audit", "make release"]
    signed = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/attest@")]
    assert signed == [
        {"subject-path": "dist/*.whl\ndist/*.tar.gz\n"},
        {"subject-path": "dist/*.whl", "sbom-path": "dist/rlplan.cdx.json"},
    ]
    assert (job["permissions"]["id-token"], job["permissions"]["attestations"]) == ("write", "write")


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
