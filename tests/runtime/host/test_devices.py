"""Whether the GPUs of a plan are there, before anything starts; and what a process without one says."""

from pathlib import Path

import pytest

from rlplan.errors import HostError
from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.host import detect
from rlplan.runtime.host.detect import Detected, check_devices, read_host
from rlplan.spec.resolved import ResolvedJob
from tests.factories import make_job


def job(**overrides: object) -> ResolvedJob:
    data = make_job(**{"hardware.num_devices": 2})
    hardware = data.hardware.model_copy(update={"profile": "h100-sxm", "memory": None, **overrides})
    return data.model_copy(update={"hardware": hardware})


def found(*names: str) -> Detected:
    gpus = tuple(DetectedGpu(index, name, 80 << 30, "9.0", "580", "NVML") for index, name in enumerate(names))
    return Detected(gpus, read_host(), ())


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "the plan is for 2 x h100-sxm, this machine has no GPU"),
        ((H100,), "this machine has 1 of them"),
        (("NVIDIA L4", "NVIDIA L4"), "this machine has NVIDIA L4, NVIDIA L4"),
    ],
)
def test_other_gpus_than_the_plan_s_are_refused(
    names: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "detect", lambda: found(*names))
    with pytest.raises(HostError, match=message) as caught:
        check_devices(job(), None)
    assert caught.value.exit_code == 4


def test_the_plan_s_own_gpus_are_taken_and_a_cluster_is_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda: found(H100, H100))
    check_devices(job(), None)
    monkeypatch.setattr(detect, "detect", found)
    check_devices(job(), "10.0.0.1:6379")
    check_devices(make_job(), None)


def test_several_hosts_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda: found(H100, H100))
    with pytest.raises(HostError, match="on 2 hosts"):
        check_devices(job(num_hosts=2), None)


def test_a_process_that_sees_no_gpu_says_so() -> None:
    from rlplan.runtime.workers.worker_device import worker_device

    assert worker_device(make_job()).type == "cpu"
    with pytest.raises(HostError, match="sees no CUDA device"):
        worker_device(job())


def test_a_refused_run_writes_nothing(tmp_path: Path) -> None:
    from rlplan.planner.executable import require_executable
    from rlplan.planner.search import find_best_plan
    from rlplan.runtime.driver.launch import prepare_task
    from rlplan.spec.files.job_file import load_job
    from tests.factories import EXAMPLES

    plan = require_executable(find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml")))
    with pytest.raises(HostError, match="8 x h100-sxm, this machine has"), prepare_task(plan):
        pytest.fail("it is ready")
    assert list(tmp_path.iterdir()) == []
