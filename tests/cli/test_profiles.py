"""`rlplan profiles` as its user sees it: whole lines at any width, JSON, and one message for a mistake."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rlplan_cli.render.terminal import PIPE_WIDTH, stdout

from rlplan.runtime.measure import microbench
from rlplan.runtime.measure.microbench import Measured, Rate
from rlplan.spec.base import validate
from rlplan.spec.hardware.catalogue import profile_paths
from rlplan.spec.hardware.profile import GpuProfile
from rlplan.units import GIB
from tests.cli.conftest import Answer, Call

Profiles = Callable[..., Answer]


@pytest.fixture
def profiles(rlplan: Call, monkeypatch: pytest.MonkeyPatch) -> Profiles:
    """`rlplan profiles ...`; columns: of a terminal; path: what replaces PATH; folder: of one's own profiles."""

    def call(
        *arguments: str, columns: int | None = None, path: str | None = None, folder: Path | None = None
    ) -> Answer:
        for name, value in {"COLUMNS": columns, "PATH": path, "RLPLAN_PROFILES": folder}.items():
            if value is not None:
                monkeypatch.setenv(name, str(value))
            elif name != "PATH":
                monkeypatch.delenv(name, raising=False)
        # The consoles took their width when they were made, as they do in a process of their own.
        monkeypatch.setattr(stdout, "width", columns or PIPE_WIDTH)
        return rlplan("profiles", *arguments)

    return call


@pytest.mark.parametrize("columns", [80, 140, None])
def test_list_fits_the_screen_and_cuts_nothing(profiles: Profiles, columns: int | None) -> None:
    done = profiles("list", columns=columns)
    assert done.exit_code == 0, done.err
    lines = done.out.splitlines()
    assert max(len(line) for line in lines) <= (columns or 120)
    assert "…" not in done.out
    assert {line.split()[0] for line in lines if line.strip()} >= set(profile_paths())


def test_list_as_json_has_bytes_and_rates_of_every_profile(profiles: Profiles) -> None:
    printed = json.loads(profiles("list", "--json").out)
    assert printed["schema_version"] == 1
    rows = {row["name"]: row for row in printed["profiles"]}
    assert set(rows) == set(profile_paths())
    assert rows["h100-sxm"]["memory_bytes_per_s"] == 3_350_000_000_000
    assert rows["h100-sxm"]["dense_flops_per_s"]["bfloat16"] == 989_400_000_000_000
    assert (rows["dgx-h100"]["gpu"], rows["dgx-h100"]["num_gpus"]) == ("h100-sxm", 8)
    assert all(row["memory_bytes"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", ["h100", "mi300x", "dgx-h100", "cpu-host", "gb200-nvl72"])
@pytest.mark.parametrize("columns", [80, 140])
def test_show_has_a_source_for_every_value(profiles: Profiles, name: str, columns: int) -> None:
    done = profiles("show", name, columns=columns)
    assert done.exit_code == 0, done.err
    assert max(len(line) for line in done.out.splitlines()) <= columns
    assert "provenance" in done.out
    assert "kind: " in done.out
    assert "None" not in done.out


def test_show_as_json_is_the_profile(profiles: Profiles) -> None:
    profile = validate(GpuProfile, json.loads(profiles("show", "l40s", "--json").out), file="stdout")
    assert profile.name == "l40s"


def test_show_checks_a_file_of_ones_own(profiles: Profiles, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(profile_paths()["l40s"].read_text().replace("name: l40s", "name: mine"))
    assert "mine: L40S" in profiles("show", str(path)).out
    path.write_text(path.read_text().replace("864GB/s", "864G"))
    done = profiles("show", str(path))
    assert done.exit_code == 2
    assert "memory_bytes_per_s.value" in done.err
    assert "Traceback" not in done.err


def test_an_unknown_profile_is_one_message(profiles: Profiles) -> None:
    done = profiles("show", "h101")
    assert (done.exit_code, done.out) == (2, "")
    assert "Did you mean 'h100'?" in done.err
    assert "Traceback" not in done.err


def test_detect_without_a_gpu_says_so_and_shows_the_host(profiles: Profiles, tmp_path: Path) -> None:
    done = profiles("detect", path=str(tmp_path))
    if "GPU 0" in done.out:
        pytest.skip("this machine has a GPU that NVML shows")
    assert done.exit_code == 0, done.err
    assert "no NVIDIA GPU was found" in done.err
    assert "profile cpu-host with hardware.memory=" in done.out
    printed = json.loads(profiles("detect", "--json", path=str(tmp_path)).out)
    assert (printed["schema_version"], printed["gpus"]) == (1, [])
    assert printed["host"]["num_cores"] >= 1


def test_detect_shows_the_profile_of_a_gpu_and_a_new_one_for_another(profiles: Profiles, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    lines = "0, NVIDIA H200, 143771, 615, 9.0, 580.1\n1, NVIDIA GeForce RTX 3080, 10240, 369, 8.6, 580.1"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{lines}'\n")
    program.chmod(0o755)
    done = profiles("detect", path=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if "NVML" in done.out:
        pytest.skip("this machine has a GPU that NVML shows")
    assert "GPU 0: NVIDIA H200, 140 GiB to CUDA: profile h200-sxm" in done.out
    assert "GPU 1: NVIDIA GeForce RTX 3080, 9.64 GiB to CUDA: no profile" in done.out
    assert "name: rtx-3080\n" in done.out
    assert "memory: {value: 9871MiB, provenance: measured" in done.out


def test_measure_shows_rates_and_writes_a_profile_that_commands_find(
    profiles: Profiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses recorded measurements; tests/runtime/measure/test_microbench.py measures, and interrupts the command."""
    rows = [("matmul_float32", 2e9, "FLOP/s"), ("memory_copy", 2e9, "B/s"), ("launch", 2e-6, "s")]
    result = [Rate(name, value, value / 2, value * 2, unit, 10, "of 1 GiB") for name, value, unit in rows]
    host = Measured("cpu", "Some CPU", 2, 64 * GIB, "2.13.0", tuple(result))
    monkeypatch.setattr(microbench, "measure", lambda *_: host)
    done = profiles("measure", "--quick", "--out", str(tmp_path / "this-host.yaml"))
    assert done.exit_code == 0, done.err
    assert "GFLOP/s" in done.out
    assert "this-host" in done.err
    shown = profiles("show", "this-host", folder=tmp_path)
    assert "rlplan profiles measure" in shown.out.replace("\n", " "), shown.err


def test_measure_refuses_a_file_before_it_measures(profiles: Profiles, tmp_path: Path) -> None:
    done = profiles("measure", "--out", str(tmp_path / "no-folder" / "mine.yaml"))
    assert done.exit_code == 2
    assert "--out" in done.err
    assert "matrix products" not in done.err


def test_a_profile_of_ones_own_folder_stands_beside_the_bundled_ones_or_replaces_one(
    profiles: Profiles, tmp_path: Path
) -> None:
    text = profile_paths()["l40s"].read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: l40s", "name: mine").replace("'NVIDIA L40S'", "'Mine'"))
    (tmp_path / "l40s.yaml").write_text(text.replace("864GB/s", "432GB/s"))
    shown = json.loads(profiles("show", "l40s", "--json", folder=tmp_path).out)
    assert shown["memory_bytes_per_s"]["value"] == 432_000_000_000
    assert json.loads(profiles("show", "mine", "--json", folder=tmp_path).out)["name"] == "mine"
    done = profiles("show", "mine", folder=tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "RLPLAN_PROFILES" in done.err
