"""verl, OpenRLHF, SkyPilot and SLURM accept what is written for them by their own parsers; slime and NeMo-RL by facts.

KubeRay's schema is recorded. Left out: vLLM, DeepSpeed and TRL (test_upstream.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from rlplan.emit.launchers import write_launcher
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.export.folders import write_export
from rlplan.planner.search import find_best_plan
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.files.job_file import job_from, load_job
from tests.factories import EXAMPLES
from tests.foreign.export import own_parsers
from tests.foreign.export.learned import AHEAD, FIXED, learned_by_openrlhf, learned_by_verl, learning_plans, list_wanted
from tests.foreign.export.plans import BATCHES, list_asked, make_plan, plan_stack

ROOT = Path(__file__).resolve().parents[3]
RECORDED = YAML(typ="safe").load(Path(__file__).parent / "recorded.yaml")
PINNED = [line for line in (ROOT / "requirements" / "upstream.txt").read_text().splitlines() if line[:1] != "#"]
TRAINERS = ("verl", "openrlhf", "hydra-core", "omegaconf", "antlr4-python3-runtime", "packaging", "PyYAML")
SLURM_PACKAGES = ("slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2")
PPO = {
    "verl": ("training.backend=fsdp2", "training.backend=megatron", "training.ulysses=2", "training.lora.rank=16"),
    "openrlhf": ("training.zero_stage=3",),
}
"""Overrides of plans with a value model."""
CLUSTERS = ("2xH100", "4xH100", "8xH100", "16xH100", "8xA100")
LENGTHS = [(f"workload.max_response_len={size}",) for size in (1024, 2048, 4096)]


def exports(target: str, folder: Path, every: int = 1) -> list[Path]:
    """Folders of the thirty plans, or of each so many of them."""
    plans = [make_plan(*overrides) for overrides in list_asked(target, every)]
    folders = [folder / str(index) for index in range(len(plans))]
    for plan, folder in zip(plans, folders, strict=True):
        write_export(plan, target, folder)
    return folders


def launchers(target: str, folder: Path) -> list[Path]:
    """Folders of thirty plans on one host and on several."""
    results = []
    for index, (gpus, lengths, batches) in enumerate(product(CLUSTERS, LENGTHS, BATCHES)):
        keys = [f"hardware={gpus}", "policy=Qwen/Qwen2.5-1.5B-Instruct", *lengths, *batches]
        write_launcher(find_best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", keys)), target, folder / str(index))
        results.append(folder / str(index))
    return results


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_slime_and_megatron_have_every_flag_with_a_value_of_its_type(every: int, tmp_path: Path) -> None:
    known = RECORDED["slime"]["keys"]
    for folder in exports("slime", tmp_path, every):
        words = own_parsers.arguments(str(folder))
        for word, after in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--"):
                kind = known[word.removeprefix("--")]
                assert after.startswith("--") if kind == "none" else KINDS[kind](after) is not None, word


KINDS: dict[str, Any] = {"int": int, "float": float, "str": str}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_nemo_rl_has_every_key_with_a_value_of_its_type(every: int, tmp_path: Path) -> None:
    known = RECORDED["nemo_rl"]["keys"] | {"defaults": "str"}
    for folder in exports("nemo_rl", tmp_path, every):
        for key, value in flatten_keys(YAML(typ="safe").load(folder / "train.yaml")).items():
            if not key.startswith("policy.generation.vllm_kwargs."):
                assert known[key] in (type(value).__name__, "any"), key


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the trainers' parsers, without what they train with."""
    return install(tmp_path_factory.mktemp("trainers"), TRAINERS, "--no-deps")


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with SkyPilot, whose hundred dependencies take longer than all parsers together."""
    return install(tmp_path_factory.mktemp("skypilot"), ("skypilot",))


def install(folder: Path, packages: Sequence[str], *options: str) -> Path:
    """The Python of a new environment with packages at their pinned versions."""
    pinned = [line for line in PINNED if line.partition("==")[0] in packages]
    assert len(pinned) == len(packages)
    within(60, "a new environment", [sys.executable, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check", "--retries=1"]
    within(150, f"pip install {' '.join(pinned)}", [*pip, "--timeout=20", *options, *pinned])
    return python


def within(seconds: float, what: str, command: Sequence[str], **variables: str) -> str:
    """Run a command and return its output; fail with its last output where it fails or exceeds the deadline."""
    limit = scale_seconds(seconds)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit, env=os.environ | variables
        )
    except subprocess.TimeoutExpired as error:
        output = b"".join(stream for stream in (error.stdout, error.stderr) if isinstance(stream, bytes))
        pytest.fail(f"{what} did not end within {limit:.0f} s: {output.decode(errors='replace')[-800:] or 'no output'}")
    assert done.returncode == 0, f"{what} failed: {done.stderr[-800:]}"
    return done.stdout


def verdicts(python: Path, stack: str, folders: list[Path], **variables: str) -> list[str | None]:
    command = [str(python), own_parsers.__file__, stack, *map(str, folders)]
    text = within(150, f"{stack}'s own parser on {len(folders)} folders", command, **variables)
    results: list[str | None] = json.loads(text.splitlines()[-1])
    return results


@pytest.mark.nightly
@pytest.mark.parametrize("stack", ["verl", "openrlhf"])
def test_a_trainer_s_own_parser_accepts_every_plan_and_no_unknown_key(
    stack: str, trainers: Path, tmp_path: Path
) -> None:
    folders = exports(stack, tmp_path)
    for more in PPO[stack]:
        job = job_from({"policy": "Qwen/Qwen2.5-7B", "algorithm": "ppo", "hardware": "8xH100"}, [more])
        plan = plan_stack(job, stack)
        folders.append(tmp_path / more)
        write_export(plan, stack, folders[-1])
    for backend in ("fsdp2", "megatron") if stack == "verl" else ():
        folders.append(tmp_path / f"ahead-{backend}")
        write_export(make_plan("framework=verl", *AHEAD, f"training.backend={backend}"), stack, folders[-1])
    assert verdicts(trainers, stack, folders) == [None] * len(folders)
    script = folders[0] / "train.sh"
    wrong = "trainer.no_such_key=1" if stack == "verl" else "--no.such_key 1"
    script.write_text(script.read_text().replace('"$@"', f'{wrong} "$@"'))
    assert verdicts(trainers, stack, folders[:1]) != [None]


@pytest.mark.nightly
def test_skypilot_s_own_task_accepts_every_plan(skypilot: Path, tmp_path: Path) -> None:
    folders = launchers("skypilot", tmp_path)
    assert verdicts(skypilot, "skypilot", folders) == [None] * 30
    task = folders[0] / "task.yaml"
    task.write_text(task.read_text() + "num_hosts: 1\n")
    assert verdicts(skypilot, "skypilot", folders[:1]) != [None]


@pytest.mark.nightly
def test_kuberay_s_schema_accepts_every_plan(tmp_path: Path) -> None:
    schema = json.loads((ROOT / "tests" / "emit" / "rayjob_schema.json").read_text("utf-8"))
    for folder in launchers("kuberay", tmp_path):
        jsonschema.validate(YAML(typ="safe").load(folder / "rayjob.yaml"), schema)


@cache
def slurm(folder: Path) -> dict[str, str]:
    """Debian's sbatch, unpacked, with a cluster that nobody answers for."""
    subprocess.run(["apt-get", "download", *SLURM_PACKAGES], cwd=folder, check=True, capture_output=True, timeout=120)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    libraries = folder / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
    settings = ["ClusterName=x", "SlurmctldHost=localhost", "AuthType=auth/none", "CredType=cred/none", "GresTypes=gpu"]
    settings += [f"PluginDir={libraries / 'slurm-wlm'}", "MessageTimeout=2", "NodeName=localhost CPUs=2 Gres=gpu:8"]
    (folder / "slurm.conf").write_text("\n".join([*settings, "PartitionName=all Nodes=ALL Default=YES"]) + "\n")
    return {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{libraries / 'slurm-wlm'}:{libraries}",
        "PATH": f"{folder / 'usr' / 'bin'}:{os.environ['PATH']}",
    }


@pytest.mark.nightly
def test_slurm_s_own_sbatch_reads_every_script(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = launchers("slurm", tmp_path)
    variables = slurm(tmp_path_factory.mktemp("slurm"))
    assert verdicts(Path(sys.executable), "slurm", folders, **variables) == [None] * 30
    script = folders[0] / "train.sbatch"
    script.write_text(script.read_text().replace("#SBATCH --nodes", "#SBATCH --hosts"))
    assert verdicts(Path(sys.executable), "slurm", folders[:1], **variables) != [None]


@pytest.mark.nightly
@pytest.mark.parametrize("stack", ["verl", "openrlhf"])
def test_what_a_stack_resolves_is_what_the_plan_learns_with(stack: str, trainers: Path, tmp_path: Path) -> None:
    """Upstream's own defaults are merged with the file by its own parser, for all that changes what is learned."""
    plans = learning_plans(stack, ((), ("training.backend=fsdp2",)) if stack == "verl" else ((),))
    folders = [tmp_path / str(index) for index in range(len(plans))]
    for plan, folder in zip(plans, folders, strict=True):
        write_export(plan, stack, folder)
    command = [str(trainers), own_parsers.__file__, "--resolve", stack, *map(str, folders)]
    text = within(150, f"{stack}'s own parser on {len(folders)} folders", command)
    for plan, results in zip(plans, json.loads(text.splitlines()[-1]), strict=True):
        learned = (
            learned_by_verl(results, is_megatron=plan.job.backend == "megatron")
            if stack == "verl"
            else learned_by_openrlhf(results)
        )
        assert learned.pop("fixed") == FIXED[stack]
        wanted = list_wanted(plan)
        assert {name: learned[name] for name in wanted} == wanted
