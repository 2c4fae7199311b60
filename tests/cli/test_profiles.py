"""`rlplan profiles` as its user sees it: whole lines at any width, JSON, and one message for a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlplan.spec.base import validate
from rlplan.spec.hardware.catalogue import profile_paths
from rlplan.spec.hardware.profile import GpuProfile

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from rlplan_cli.app import main; main()"


def rlplan(
    *arguments: str, columns: int | None = None, path: str | None = None, profiles: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; columns: of a terminal; path: what replaces PATH; profiles: one's own."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"COLUMNS": str(columns)} if columns else {}
    environment |= {"PATH": path} if path is not None else {}
    environment |= {"RLPLAN_PROFILES": str(profiles)} if profiles else {}
    command = [sys.executable, "-c", MAIN, "profiles", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("columns", [80, 140, None])
def test_list_fits_the_screen_and_cuts_nothing(columns: int | None):
    done = rlplan("list", columns=columns)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= (columns or 120)
    assert "…" not in done.stdout
    assert {line.split()[0] for line in lines if line.strip()} >= set(profile_paths())


def test_list_as_json_has_bytes_and_rates_of_every_profile():
    printed = json.loads(rlplan("list", "--json").stdout)
    assert printed["schema_version"] == 1
    rows = {row["name"]: row for row in printed["profiles"]}
    assert set(rows) == set(profile_paths())
    assert rows["h100-sxm"]["memory_bytes_per_s"] == 3_350_000_000_000
    assert rows["h100-sxm"]["dense_flops_per_s"]["bfloat16"] == 989_400_000_000_000
    assert (rows["dgx-h100"]["gpu"], rows["dgx-h100"]["num_gpus"]) == ("h100-sxm", 8)
    assert all(row["memory_bytes"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", ["h100", "mi300x", "dgx-h100", "cpu-host", "gb200-nvl72"])
@pytest.mark.parametrize("columns", [80, 140])
def test_show_has_a_source_for_every_value(name: str, columns: int):
    done = rlplan("show", name, columns=columns)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert "provenance" in done.stdout
    assert "kind: " in done.stdout
    assert "None" not in done.stdout


def test_show_as_json_is_the_profile():
    profile = validate(GpuProfile, json.loads(rlplan("show", "l40s", "--json").stdout), file="stdout")
    assert profile.name == "l40s"


def test_show_checks_a_file_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(profile_paths()["l40s"].read_text().replace("name: l40s", "name: mine"))
    assert "mine: L40S" in rlplan("show", str(path)).stdout
    path.write_text(path.read_text().replace("864GB/s", "864G"))
    done = rlplan("show", str(path))
    assert done.returncode == 2
    assert "memory_bytes_per_s.value" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_profile_is_one_message():
    done = rlplan("show", "h101")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'h100'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_detect_without_a_gpu_says_so_and_shows_the_host(tmp_path: Path):
    done = rlplan("detect", path=str(tmp_path))
    if "GPU 0" in done.stdout:
        pytest.skip("this machine has a GPU that NVML shows")
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA GPU answered" in done.stderr
    assert "profile cpu-host with hardware.memory=" in done.stdout
    printed = json.loads(rlplan("detect", "--json", path=str(tmp_path)).stdout)
    assert (printed["schema_version"], printed["gpus"]) == (1, [])
    assert printed["host"]["num_cores"] >= 1


def test_detect_shows_the_profile_of_a_gpu_and_a_new_one_for_another(tmp_path: Path):
    program = tmp_path / "nvidia-smi"
    lines = "0, NVIDIA H200, 143771, 615, 9.0, 580.1\n1, NVIDIA GeForce RTX 3080, 10240, 369, 8.6, 580.1"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{lines}'\n")
    program.chmod(0o755)
    done = rlplan("detect", path=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if "NVML" in done.stdout:
        pytest.skip("this machine has a GPU that NVML shows")
    assert "GPU 0: NVIDIA H200, 140 GiB to CUDA: profile h200-sxm" in done.stdout
    assert "GPU 1: NVIDIA GeForce RTX 3080, 9.64 GiB to CUDA: no profile" in done.stdout
    assert "name: rtx-3080\n" in done.stdout
    assert "memory: {value: 9871MiB, provenance: measured" in done.stdout


def test_measure_shows_rates_and_writes_a_profile_that_commands_find(tmp_path: Path):
    done = rlplan("measure", "--quick", "--out", str(tmp_path / "this-host.yaml"))
    assert done.returncode == 0, done.stderr
    assert "GFLOP/s" in done.stdout
    assert "this-host" in done.stderr
    shown = rlplan("show", "this-host", profiles=tmp_path)
    assert "rlplan profiles measure" in shown.stdout.replace("\n", " "), shown.stderr


def test_measure_refuses_a_file_before_it_measures(tmp_path: Path):
    done = rlplan("measure", "--out", str(tmp_path / "no-folder" / "mine.yaml"))
    assert done.returncode == 2
    assert "--out" in done.stderr
    assert "matrix products" not in done.stderr


def test_a_profile_of_ones_own_folder_stands_beside_the_bundled_ones_or_replaces_one(tmp_path: Path):
    text = profile_paths()["l40s"].read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: l40s", "name: mine").replace("'NVIDIA L40S'", "'Mine'"))
    (tmp_path / "l40s.yaml").write_text(text.replace("864GB/s", "432GB/s"))
    shown = json.loads(rlplan("show", "l40s", "--json", profiles=tmp_path).stdout)
    assert shown["memory_bytes_per_s"]["value"] == 432_000_000_000
    assert json.loads(rlplan("show", "mine", "--json", profiles=tmp_path).stdout)["name"] == "mine"
    done = rlplan("show", "mine", profiles=tmp_path / "nowhere")
    assert done.returncode == 2
    assert "RLPLAN_PROFILES" in done.stderr
