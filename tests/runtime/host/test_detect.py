"""The driver's facts become a GPU, a profile or the text of one; a machine without a GPU says so.

NVML and nvidia-smi stand in as what they are to us: a module with some functions, a program that prints lines.
"""

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlplan.runtime.device.nvml import DetectedGpu, read_nvml
from rlplan.runtime.host.detect import (
    detect,
    match_profile,
    new_profile_yaml,
    parse_smi,
    read_host,
)
from rlplan.spec.hardware.catalogue import load_profiles, read_profile
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import GIB, MIB

H200 = "0, NVIDIA H200, 143771, 615, 9.0, 580.105.08\n"


def fake_nvml(name: Any = b"NVIDIA H200", total: int = 143_771, reserved: int = 615, **changes: Any) -> SimpleNamespace:
    """A started NVML with two GPUs of one kind, in MiB, as nvidia-ml-py 13 answers."""

    class NVMLError(Exception):
        pass

    def memory_info(device: int, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(total=total * MIB, reserved=reserved * MIB)

    functions = {
        "NVMLError": NVMLError,
        "nvmlMemory_v2": 0x02000028,
        "nvmlSystemGetDriverVersion": lambda: "580.105.08",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda device: name,
        "nvmlDeviceGetCudaComputeCapability": lambda device: (9, 0),
        "nvmlDeviceGetMemoryInfo": memory_info,
    }
    return SimpleNamespace(**(functions | changes))


def put_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name in front of the PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_nvml_gives_what_cuda_reports_total_less_reserved():
    first, second = read_nvml(fake_nvml(), GIB)
    assert first == DetectedGpu(0, "NVIDIA H200", 143_156 * MIB, "9.0", "580.105.08", "NVML")
    assert second.index == 1


def test_an_old_pynvml_without_the_reserved_bytes_gives_the_total():
    def memory_info(device: int) -> SimpleNamespace:
        return SimpleNamespace(total=100 * MIB)

    assert read_nvml(fake_nvml(nvmlDeviceGetMemoryInfo=memory_info), GIB)[0].memory_bytes == 100 * MIB


def test_a_gpu_that_shares_the_hosts_memory_has_the_hosts_total():
    nvml = fake_nvml("NVIDIA GB10")

    def refuse(device: int, version: int | None = None) -> None:
        raise nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceGetMemoryInfo = refuse
    assert read_nvml(nvml, GIB)[0].memory_bytes == GIB


def test_nvidia_smi_lines_become_gpus_and_others_are_passed_over():
    text = (
        H200
        + "1, NVIDIA H200, 143771, [N/A], [N/A], 470.1\nwarning: something\n\n2, NVIDIA GB10, [N/A], [N/A], 12.1, 580"
    )
    first, old, shared = parse_smi(text)
    assert (first.memory_bytes, first.compute_capability) == (143_156 * MIB, "9.0")
    assert (old.memory_bytes, old.compute_capability) == (143_771 * MIB, "")
    assert shared.memory_bytes == read_host().total_bytes


def test_every_profile_is_found_by_each_of_its_driver_names():
    gpus = [profile for profile in load_profiles().values() if isinstance(profile, GpuProfile)]
    named = [(gpu, name) for gpu in gpus for name in gpu.driver_names]
    assert len(named) >= len(gpus) > 10
    assert [(gpu.name, name) for gpu, name in named if match_profile(name, gpu.memory.value) != gpu.name] == []


@pytest.mark.parametrize(
    ("name", "memory"),
    [("NVIDIA H200", 80 * GIB), ("NVIDIA", 80 * GIB), ("H100", 80 * GIB), ("halved", 80 * GIB), ("", 0)],
)
def test_a_gpu_of_another_name_or_size_has_no_profile(name: str, memory: int):
    assert match_profile(name, memory) is None


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3080", "Somebody's GPU: {x}", "NVIDIA " + "long " * 20])
def test_the_new_profile_of_an_unknown_gpu_can_be_read(name: str, tmp_path: Path):
    text = new_profile_yaml(DetectedGpu(0, name, 9_871 * MIB, "8.6", "580.1", "NVML"))
    file_name = text.split("Save as ")[1].split(";")[0]
    (tmp_path / file_name).write_text(text)
    profile = read_profile(tmp_path / file_name)
    assert isinstance(profile, GpuProfile)
    assert profile.driver_names == (name,)
    assert profile.memory.value == 9_871 * MIB
    assert profile.memory.provenance == "measured"


def test_detect_takes_nvidia_smis_word_where_nvml_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    put_nvidia_smi(tmp_path, f"cat <<'END'\n{H200}END", monkeypatch)
    result = detect()
    assert [(gpu.profile, gpu.source) for gpu in result.gpus] == [("h200-sxm", "nvidia-smi")]
    assert result.remarks == ()


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo 'NVIDIA-SMI has failed: no driver'; exit 9", "no driver"), ("exit 3", "exit 3"), ("true", "no NVIDIA GPU")],
)
def test_detect_says_why_there_is_no_gpu(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    put_nvidia_smi(tmp_path, script, monkeypatch)
    result = detect()
    assert result.gpus == ()
    assert message in " ".join(result.remarks)
    assert result.host.num_cores >= 1
    assert 0 < result.host.memory_bytes <= result.host.total_bytes
