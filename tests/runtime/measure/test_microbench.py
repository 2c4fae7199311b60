"""Microbenchmarks on this machine's CPU, and the profiles that they become."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.errors import HostError, RunError, SpecError
from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.measure import microbench, microbench_ranks
from rlplan.runtime.measure.measured_profile import check_out, write_profiles
from rlplan.runtime.measure.microbench import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    Measured,
    Rate,
    measure_disk,
    quartiles,
    rate,
    sample,
)
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.hardware.catalogue import find_profile, read_profile
from rlplan.spec.hardware.profile import ComputeDtype, CpuProfile, GpuProfile, NodeProfile
from rlplan.units import GIB, MIB
from rlplan.vocabulary import Provenance
from tests.factories import ROOT
from tests.repository.at_night import mark_nightly
from tests.waiting import limit_time, wait_until

TINY = dataclasses.replace(
    microbench.QUICK, seconds=0.05, cpu_matrices=(64,), copy_bytes=16 * MIB, disk_bytes=16 * MIB, collective_bytes=MIB
)


def found(name: str, value: float, unit: str = "B/s") -> Rate:
    return Rate(name, value, value * 0.9, value * 1.1, unit, 10, "1 GiB")


def on_gpu(*measurements: Rate) -> Measured:
    return Measured("cuda", "Some CPU", 32, 512 * GIB, "2.13.0", measurements)


H200 = DetectedGpu(0, "NVIDIA H200", 150 * 10**9, "9.0", "580.1", "NVML", "h200-sxm")


def test_a_rate_is_the_amount_over_the_median_of_the_seconds():
    measured = rate("copy", 100.0, [1.0, 2.0, 2.0, 4.0, 50.0], "B/s", "100 bytes")
    assert (measured.value, measured.low, measured.high) == (50.0, 25.0, 50.0)
    assert measured.spread == 0.5
    assert quartiles([3.0]) == (3.0, 3.0)


def test_samples_stop_when_their_seconds_are_over_but_are_never_too_few():
    with limit_time(5):
        assert len(sample(lambda: time.sleep(0.05), 0.01)) == MIN_SAMPLES
        assert len(sample(lambda: None, 60.0)) == MAX_SAMPLES


def test_everything_of_a_cpu_is_measured_and_becomes_a_profile_that_the_reader_accepts(tmp_path: Path):
    message: list[str] = []
    with limit_time(60):
        measured = microbench.measure(TINY, tmp_path, message.append)
    names = [each.name for each in measured.measurements]
    assert names == [
        *("matmul_float32", "matmul_bfloat16", "memory_copy", "launch", "fresh_memory", "all_reduce", "all_gather"),
        *("small_all_reduce", "disk_write"),
    ]
    assert all(0 < each.low <= each.value <= each.high for each in measured.measurements)
    assert len(message) == 7
    assert list(tmp_path.iterdir()) == []
    json.dumps(measured.as_json())

    (path,) = write_profiles(measured, (), tmp_path / "this-host.yaml")
    profile = read_profile(path)
    assert isinstance(profile, CpuProfile)
    assert profile.rates
    assert profile.rates.memory_bytes_per_s
    copied = measured.find("memory_copy")
    assert copied
    assert profile.rates.memory_bytes_per_s.value == pytest.approx(copied.value, rel=1e-3)
    assert profile.rates.memory_bytes_per_s.provenance is Provenance.MEASURED
    assert set(profile.rates.flops_per_s) == {ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16}
    assert measured.processor in profile.rates.flops_per_s[ComputeDtype.FLOAT32].source
    assert profile.memory.value == measured.memory_bytes
    assert list(tmp_path.iterdir()) == [path]


def test_a_gpu_profile_has_the_measured_shares_and_keeps_the_rest(tmp_path: Path):
    base = find_profile("h200-sxm", where="test")
    assert isinstance(base, GpuProfile)
    assert base.memory_bytes_per_s
    assert base.host_link
    measured = on_gpu(
        found("matmul_bfloat16", 0.7 * base.dense_flops_per_s[ComputeDtype.BFLOAT16].value, "FLOP/s"),
        found("memory_copy", 1.2 * base.memory_bytes_per_s.value),
        found("host_to_device", 0.9 * base.host_link.bytes_per_s.value),
        found("device_to_host", 0.8 * base.host_link.bytes_per_s.value),
        found("disk_write", 3e9),
    )
    first, second = write_profiles(measured, (H200,) * 4, tmp_path / "mine.yaml")
    gpu, node = read_profile(first), read_profile(second)
    assert isinstance(gpu, GpuProfile)
    assert isinstance(node, NodeProfile)
    assert gpu.efficiencies
    assert (gpu.efficiencies.matmul.value, gpu.efficiencies.memory.value) == (0.7, 1.0)
    assert gpu.efficiencies.host_link.value == 0.8, "the slower direction"
    assert gpu.efficiencies.device_link == base.efficiencies.device_link if base.efficiencies else None
    assert gpu.serving == base.serving
    assert (node.gpu, node.num_gpus, node.host_memory.value) == ("mine", 4, 512 * GIB)
    assert node.efficiencies
    assert node.efficiencies.disk_bytes_per_s.value == 3_000_000_000
    assert node.efficiencies.network.provenance is Provenance.ASSUMED


def test_a_gpu_that_no_profile_names_is_refused_with_the_way_to_name_it(tmp_path: Path):
    with pytest.raises(HostError, match="RLPLAN_PROFILES"):
        write_profiles(on_gpu(), (dataclasses.replace(H200, profile=None),), tmp_path / "mine.yaml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mine.yml", "Mine.yaml", "x" * 40 + ".yaml", "there.yaml", "no/folder.yaml"])
def test_a_file_that_cannot_become_a_profile_is_refused_before_anything_is_measured(name: str, tmp_path: Path):
    (tmp_path / "there.yaml").touch()
    with pytest.raises(SpecError) as caught:
        check_out(tmp_path / name)
    assert caught.value.where == "--out"


def test_a_full_disk_is_a_remark(tmp_path: Path):
    remarks: list[str] = []
    assert measure_disk(tmp_path, dataclasses.replace(TINY, disk_bytes=1 << 60), remarks) == []
    assert "no disk was measured" in remarks[0]


def test_a_rank_that_fails_ends_the_others_and_says_why(monkeypatch: pytest.MonkeyPatch):
    """Ranks that import nothing: the first fails, the second waits for its input to end, as a real one does."""
    program = "import json, os, sys; os.read(0, 1) if json.loads(sys.argv[1])['rank'] else sys.exit('no such link')"
    monkeypatch.setattr(
        microbench_ranks,
        "make_module_command",
        lambda _, *words: [sys.executable, "-c", program, *words, "microbench_ranks"],
    )
    with pytest.raises(RunError, match="a process of the collective benchmark failed: no such link"):
        microbench_ranks.measure_collectives("cpu", 2, 8, 0.01)
    assert ranks_of(os.getpid()) == []


@pytest.mark.parametrize("number", mark_nightly((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), but=(signal.SIGTERM,)))
def test_a_stopped_microbenchmark_leaves_no_process_and_no_file(number: signal.Signals, tmp_path: Path):
    """Stopped in the middle of its collectives; a kill leaves the ranks to notice by themselves."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()", "microbench_ranks"]
    program = (
        "from rlplan.runtime.measure import microbench_ranks\n"
        # a rank that is ended by its parent need not have imported torch for it
        f"if {number == signal.SIGTERM}: microbench_ranks.make_module_command = lambda *_: {waits}\n"
        "from rlplan.runtime.measure import microbench\n"
        "from rlplan.runtime.measure.microbench import Effort\n"
        f"microbench.QUICK = {TINY}\n"
        "from rlplan_cli.app import main; main()"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program, "profiles", "measure", "--quick", "--out", str(tmp_path / "mine.yaml")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ranks = wait_for_ranks(
            started.pid, pause_s=0.2 if number == signal.SIGTERM else 0.02
        )  # they stay, or work briefly
        started.send_signal(number)
        _, errors = started.communicate(timeout=scale_seconds(30))
    finally:
        started.kill()
    assert started.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in errors
    wait_until(lambda: not any(is_running(rank) for rank in ranks), 20)
    assert list(tmp_path.iterdir()) == []


def ranks_of(parent: int) -> list[int]:
    return [pid for pid in all_processes() if parent_of(pid) == parent and "microbench_ranks" in command_of(pid)]


def wait_for_ranks(parent: int, pause_s: float) -> list[int]:
    wait_until(lambda: len(ranks_of(parent)) == 2, 60, pause_s=pause_s)
    return ranks_of(parent)


def all_processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return "microbench_ranks" in command_of(pid)
