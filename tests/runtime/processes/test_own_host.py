"""A run on one host is alone with itself: nothing listens outwards, and nothing is imported from the current folder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.runtime.environments.pool import EnvironmentPool
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.spec.parts.environment import EnvironmentSpec
from tests.factories import ROOT, make_plan
from tests.runtime.conftest import DEADLINE_S, RLPLAN, FinishedRun, alive
from tests.runtime.runs.architectures import make_choices
from tests.runtime.runs.beside_the_plan import check_steps
from tests.runtime.traps import set_traps, trapped_model
from tests.waiting import wait_until

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
INSTALLED = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
"""The tests' own modules are not installed: a process in another folder finds them so."""


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is full of traps; the file that one would make."""
    sprung = set_traps(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", INSTALLED["PYTHONPATH"])
    return sprung


def test_no_process_of_ours_is_started_with_the_current_folder_on_its_path() -> None:
    """`python -m` puts it there; every module that we start goes through one place."""
    sources = {path: path.read_text("utf-8") for path in (ROOT / "rlplan").rglob("*.py")}
    reads_commands = ROOT / "rlplan/foreign"  # of other programs; nothing is started there
    named = [path.name for path, text in sources.items() if '"-m"' in text and not path.is_relative_to(reads_commands)]
    assert named == ["safe_path.py"]
    assert not [path for path, text in sources.items() if "subprocess" in text and path.is_relative_to(reads_commands)]
    assert [path.name for path, text in sources.items() if "sys.executable" in text] == ["safe_path.py"]


def test_a_process_beside_the_run_does_not_look_into_the_current_folder(traps: Path, tmp_path: Path) -> None:
    done = subprocess.run(make_module_command("site"), capture_output=True, text=True, check=True)
    assert str(tmp_path) not in done.stdout.partition("USER_BASE")[0]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "game.py").write_text("def play(messages, answer):\n    return {'observation': answer}\n")
    spec = EnvironmentSpec(path=f"{tmp_path / 'own' / 'game.py'}:play", num_workers=1)
    pool = EnvironmentPool(spec, tmp_path / "log.txt")
    try:
        pool.ask(0, {"play": [{"role": "assistant", "content": "x"}], "answer": "42"})
        deadline, hits = time.monotonic() + 30, []
        while not hits and time.monotonic() < deadline:
            hits = pool.take_answers()
            time.sleep(0.01)
    finally:
        pool.close()
    assert [answer.value for _, answer in hits] == [{"observation": "42"}]
    assert not traps.exists(), traps.read_text()


@pytest.fixture(scope="module")
def ray_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer of one run's Ray, which was started from a folder of traps."""
    folder, logs = tmp_path_factory.mktemp("traps"), tmp_path_factory.mktemp("logs")
    sprung = set_traps(folder)
    errors = folder / "errors"
    with errors.open("wb") as log, subprocess.Popen(
        [sys.executable, "-P", str(ROOT / "tests" / "runtime" / "live" / "live_ray.py"), str(logs)],
        cwd=folder, env=os.environ | INSTALLED, stdout=subprocess.PIPE, stderr=log, text=True,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None, "a pipe"
        answer: dict[str, Any] = next((json.loads(line) for line in driver.stdout if line.startswith('{"paths"')), {})
        driver.kill()
    assert answer, errors.read_text()
    return answer | {"folder": str(folder), "sprung": sprung.read_text() if sprung.exists() else ""}


@pytest.mark.engine
def test_every_port_of_a_run_s_own_ray_is_on_the_loopback(ray_of_a_run: dict[str, Any]) -> None:
    assert len(ray_of_a_run["listening"]) >= 5, "the driver, GCS, raylet, agents and workers listen"
    assert [port for port in ray_of_a_run["listening"] if port[1] not in LOOPBACK] == []


@pytest.mark.engine
def test_ray_s_metrics_have_no_port(ray_of_a_run: dict[str, Any]) -> None:
    assert ray_of_a_run["metrics_port"] in (-1, 0)
    assert ray_of_a_run["metrics_answered"] == []


@pytest.mark.engine
def test_neither_ray_s_workers_nor_what_they_start_look_into_the_current_folder(ray_of_a_run: dict[str, Any]) -> None:
    folder, paths = ray_of_a_run["folder"], ray_of_a_run["paths"]
    assert folder not in paths["own"]
    assert "" not in paths["own"]
    assert f"'{folder}'" not in paths["child"]
    assert ray_of_a_run["sprung"] == ""


@pytest.mark.engine
def test_a_driver_that_is_killed_outright_takes_its_workers_along(ray_of_a_run: dict[str, Any]) -> None:
    worker = ray_of_a_run["paths"]["pid"]
    assert worker != os.getpid()
    wait_until(lambda: alive([worker]) == [], 20)


def outward_ports(pid: int) -> set[str]:
    """Ports of a process and all below it that others than this host could reach."""
    hits = set()
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return hits
    for process in processes:
        try:
            ports = [
                connection.laddr
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
            hits |= {f"{process.name()} at {port.ip}" for port in ports if port.ip not in LOOPBACK}
        except psutil.Error:
            continue
    return hits


@pytest.mark.engine
def test_a_run_from_inside_a_bundle_full_of_traps_springs_none_and_listens_nowhere_else(tmp_path: Path) -> None:
    """Files that the plan does not give are not opened, whatever their names, and Python in the model's folder is not
    imported; trainer, engine and Ray are all up. Caches are empty, so that the architecture is proved first, and vLLM
    inspects its class in a process of its own, as on a new machine. The model has experts, which take three steps as
    every architecture does in tests/runtime/runs/test_architectures.py.
    """
    bundle, model = tmp_path / "bundle", tmp_path / "model"
    mixtral = make_choices("MixtralForCausalLM", tmp_path / "mixtral") | {"preflight.rehearses": False}
    of_model = trapped_model(tmp_path / "mixtral", model)
    write_bundle(make_plan(**mixtral, **{"policy.path": str(model)}), bundle)
    sprung = set_traps(bundle)
    as_new = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (tmp_path / "said").open("wb") as answer:
        command = [RLPLAN, "run", ".", "--out", str(tmp_path / "run")]
        run = subprocess.Popen(command, cwd=bundle, env=os.environ | INSTALLED | as_new, stdout=answer, stderr=answer)
    deadline, outwards = time.monotonic() + DEADLINE_S, set()
    try:
        while run.poll() is None:
            assert time.monotonic() < deadline
            outwards |= outward_ports(run.pid)
            time.sleep(1)  # who listens does so for long; asking five times as often took 29 s of CPU
    finally:
        run.terminate()
        run.wait(30)
    check_steps(FinishedRun(tmp_path / "run", run.returncode, "", (tmp_path / "said").read_text()), within=1e-4)
    assert not sprung.exists(), sprung.read_text()
    assert not of_model.exists(), of_model.read_text()
    assert outwards == set()
