"""The wheel: what it holds, and what it does where nothing but the core dependencies is installed.

Left out: what the project declares (test_packaging.py).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType

import pytest

from rlplan.spec.files.yaml import read_yaml
from tests.hub_server import CONFIG, serve_hub
from tests.repository.at_night import mark_nightly
from tests.repository.test_packaging import IMPORT_EVERYTHING_PURE, ROOT, core_closure


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return next(folder.glob("*.whl"))


def test_the_description_has_no_image_and_no_link_that_an_index_lacks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    description = metadata.partition("\n\n")[2]
    assert description.startswith("# rlplan")
    assert re.findall(r"\]\((?!https://)[^)]*\)", description) == []


@pytest.fixture(scope="module")
def fresh_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel and the core dependencies, copied from here (offline), and nothing else: its bin/."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    for name in core_closure():
        for file in distribution(name).files or []:
            if ".." not in file.parts:
                target = site_packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file.locate(), target)  # with its time, by which byte code is that of a file
    install = ["-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, *install, "--no-compile", str(wheel)], check=True, capture_output=True, text=True)
    return folder / "bin"


def run_outside(
    fresh_venv: Path, folder: Path, *command: str, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    ours = ("PYTHON", "VIRTUAL_ENV", "HF_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [str(fresh_venv / command[0]), *command[1:]],
        cwd=folder,
        env=environment | {"HOME": str(folder)} | variables,
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_the_library_the_command_line_and_the_profiles_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rlplan", "rlplan_cli"}
    profiles = ROOT / "hardware_profiles"
    in_checkout = {path.relative_to(profiles).as_posix() for path in profiles.rglob("*.yaml")}
    prefix = "rlplan/_hardware_profiles/"
    in_wheel = {name.removeprefix(prefix) for name in names if name.startswith(prefix) and name.endswith(".yaml")}
    assert in_wheel == in_checkout != set()


def test_the_wheel_holds_every_profile_as_json_too(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        folders = {"hardware_profiles/*/*.yaml": "rlplan/_", "rlplan/frameworks/*.yaml": ""}
        for path, prefix in ((path, prefix) for files, prefix in folders.items() for path in sorted(ROOT.glob(files))):
            parsed = archive.read(f"{prefix}{path.relative_to(ROOT).with_suffix('.json').as_posix()}")
            assert json.loads(parsed) == json.loads(json.dumps(read_yaml(path, "a profile"), default=str)), path.name


def profile_files() -> list[Path]:
    return sorted(path for kind in ("gpu", "node") for path in (ROOT / "hardware_profiles" / kind).glob("*.yaml"))


def test_the_installed_wheel_looks_words_up_and_writes_a_job_from_another_folder(fresh_venv: Path, tmp_path: Path):
    pages = run_outside(fresh_venv, tmp_path, "rlplan", "docs")
    assert [path.stem for path in (ROOT / "docs").glob("*.md") if path.stem not in pages.stdout] == []
    assert "DeepSpeed's ZeRO stage" in run_outside(fresh_venv, tmp_path, "rlplan", "docs", "zero_stage").stdout
    job = tmp_path / "job.yaml"
    initialized = run_outside(
        fresh_venv, tmp_path, "rlplan", "init", str(job), "--gpus", "8xH100", "--reward", "function"
    )
    assert initialized.returncode == 0, initialized.stderr
    assert run_outside(fresh_venv, tmp_path, "rlplan", "plan", str(job)).stdout.startswith("fits")
    watched = run_outside(fresh_venv, tmp_path, "rlplan", "watch", str(tmp_path))
    assert (watched.returncode, "is not a run folder" in watched.stderr) == (2, True)


READ_FRAMEWORKS = """
from rlplan.frameworks.profile import NAMES, find_release, list_versions
print([find_release(f"{name}@{version}") for name in NAMES for version in list_versions(name)])
"""


def test_the_installed_wheel_reads_every_release_of_every_framework_as_the_checkout_does(
    fresh_venv: Path, tmp_path: Path
):
    done = run_outside(fresh_venv, tmp_path, "python", "-c", READ_FRAMEWORKS)
    assert done.returncode == 0, done.stderr
    here = subprocess.run([sys.executable, "-c", READ_FRAMEWORKS], capture_output=True, text=True, check=True)
    assert done.stdout == here.stdout


@pytest.mark.nightly
def test_the_installed_wheel_lists_every_profile_from_another_folder(fresh_venv: Path, tmp_path: Path):
    done = run_outside(fresh_venv, tmp_path, "rlplan", "profiles", "list")
    assert done.returncode == 0, done.stderr
    assert [path.stem for path in profile_files() if path.stem not in done.stdout] == []


def test_every_module_below_the_runtime_works_with_the_core_dependencies_alone(fresh_venv: Path, tmp_path: Path):
    done = run_outside(fresh_venv, tmp_path, "python", "-c", IMPORT_EVERYTHING_PURE)
    assert done.returncode == 0, done.stderr


def test_a_missing_extra_is_one_message_and_no_traceback(fresh_venv: Path, tmp_path: Path):
    job = str(ROOT / "examples" / "quickstart.yaml")
    done = run_outside(fresh_venv, tmp_path, "rlplan", "run", job)
    assert done.returncode == 4, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr


def test_a_light_installation_is_at_most_sixteen_packages_and_seventy_megabytes(fresh_venv: Path):
    site_packages = next(fresh_venv.parent.glob("lib/python*/site-packages"))
    assert len(list(site_packages.glob("*.dist-info"))) <= 16
    assert sum(path.stat().st_size for path in site_packages.rglob("*") if path.is_file()) <= 70e6


COUNT_THE_START = """
import atexit, cProfile, json, sys
profile = cProfile.Profile()

def told():
    profile.disable()
    from rlplan.spec.base import Spec
    specs = [Spec]
    for each in specs:
        specs += each.__subclasses__()
    modules, calls = sorted(sys.modules), sum(each.callcount for each in profile.getstats())
    built = sorted(each.__name__ for each in specs if each.__pydantic_complete__)
    print(json.dumps({"modules": modules, "calls": calls, "built": built}), file=sys.stderr)

atexit.register(told)
profile.enable()
from rlplan_cli.__main__ import main
main()
"""


def test_an_estimate_starts_little_beside_its_search(fresh_venv: Path, tmp_path: Path):
    words = ("estimate", "--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH200")  # the fastest layout leaves room: one search
    first, done = (run_outside(fresh_venv, tmp_path, "python", "-c", COUNT_THE_START, *words) for _ in range(2))
    assert (first.returncode, done.returncode) == (0, 0), done.stderr  # the first one compiles
    counted = json.loads(done.stderr.splitlines()[-1])
    unused = ("ruamel", "simpy", "asyncio", "rlplan.runtime", "rlplan.report", "rlplan.foreign", "rlplan.accuracy")
    assert [name for name in counted["modules"] if name.startswith(unused)] == []
    # Measured: 514 modules and 1,084,000 calls.
    assert len(counted["modules"]) <= 520
    assert counted["calls"] <= 1_110_000
    # A validator takes half a millisecond to four to build: of the job as a whole, and not once more of its parts.
    parts = {"Algorithm", "CatalogueEntry", "ConstantLengths", "Fingerprints", "GpuProfile", "JobSpec", "Layout"}
    assert set(counted["built"]) <= parts | {"ModelSpec", "NodeProfile", "SourcedBytes", "ValueSpec"}


ESTIMATE = ("rlplan", "estimate", "--algorithm", "grpo", "--gpus", "8xH100", "--model")


def test_the_installed_wheel_plans_with_a_model_of_the_hub(fresh_venv: Path, tmp_path: Path):
    with serve_hub() as hub:
        done = run_outside(
            fresh_venv, tmp_path, *ESTIMATE, "someone/model", "--json", variables={"HF_ENDPOINT": hub.address}
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "fits"
    assert hub.requests[0][0] == "/someone/model/resolve/main/config.json"


@pytest.mark.parametrize(
    "variables",
    mark_nightly([{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], but=1),
    ids=["no network", "switched off"],
)
def test_the_installed_wheel_says_without_a_network_what_to_fetch_and_where_to_name_it(
    variables: dict[str, str], fresh_venv: Path, tmp_path: Path
):
    done = run_outside(fresh_venv, tmp_path, *ESTIMATE, "someone/Qwen2.5-7Bb", variables=variables)
    assert done.returncode == 4, (done.stdout, done.stderr)
    what, where, rule, way_out = done.stderr.splitlines()
    assert what.startswith("error: model 'someone/Qwen2.5-7Bb' is not bundled, and the hub cannot be reached: ")
    assert where == "  where: policy"
    assert rule == "  rule: models that are not bundled come from the hub. Did you mean 'Qwen/Qwen2.5-7B'?"
    endpoint = variables.get("HF_ENDPOINT", "https://huggingface.co")
    assert f"curl -fLo config.json {endpoint}/someone/Qwen2.5-7Bb/resolve/main/config.json" in way_out
    assert way_out.endswith("policy=config.json")
    (tmp_path / "config.json").write_bytes(CONFIG)
    again = run_outside(fresh_venv, tmp_path, *ESTIMATE[:-1], "policy=config.json", variables=variables)
    assert again.returncode == 0, again.stderr
