"""verl, OpenRLHF, SkyPilot and SLURM accept what is written for them by their own parsers; slime and NeMo-RL by facts.

KubeRay's schema is recorded. Left out: vLLM, DeepSpeed and TRL (test_upstream.py).
"""

import json
import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from rlplan.emit.launchers import write_launcher
from rlplan.foreign.documents import flat
from rlplan.foreign.export.folders import write_export
from rlplan.foreign.export.planned import planned_for
from rlplan.planner.search import best_plan
from rlplan.spec.files.job_file import job_from, load_job
from tests.factories import EXAMPLES
from tests.foreign.export import own_parsers
from tests.foreign.export.plans import BATCHES, asked_of, plan_of

ROOT = Path(__file__).resolve().parents[3]
RECORDED = YAML(typ="safe").load(Path(__file__).parent / "recorded.yaml")
PINNED = [line for line in (ROOT / "requirements" / "upstream.txt").read_text().splitlines() if line[:1] != "#"]
SLURM_PACKAGES = ("slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2")
PPO = {
    "verl": ("target=fsdp2", "target=megatron", "training.ulysses=2", "training.lora.rank=16"),
    "openrlhf": ("training.zero_stage=3",),
}
"""What plans with a value model are asked to have."""
CLUSTERS = ("2xH100", "4xH100", "8xH100", "16xH100", "8xA100")
LENGTHS = [(f"workload.max_response_len={size}",) for size in (1024, 2048, 4096)]


def exports(target: str, folder: Path, every: int = 1) -> list[Path]:
    """Folders of the thirty plans, or of each so many of them."""
    plans = [plan_of(*overrides) for overrides in asked_of(target, every)]
    folders = [folder / str(index) for index in range(len(plans))]
    for plan, one in zip(plans, folders, strict=True):
        write_export(plan, target, one)
    return folders


def launchers(target: str, folder: Path) -> list[Path]:
    """Folders of thirty plans on one host and on several."""
    found = []
    for index, (gpus, lengths, batches) in enumerate(product(CLUSTERS, LENGTHS, BATCHES)):
        keys = [f"hardware={gpus}", "policy=Qwen/Qwen2.5-1.5B-Instruct", *lengths, *batches]
        write_launcher(best_plan(load_job(EXAMPLES / "grpo-7b-8xh100.yaml", keys)), target, folder / str(index))
        found.append(folder / str(index))
    return found


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
        for key, value in flat(YAML(typ="safe").load(folder / "train.yaml")).items():
            if not key.startswith("policy.generation.vllm_kwargs."):
                assert known[key] in (type(value).__name__, "any"), key


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the other stacks in it: its Python."""
    folder = tmp_path_factory.mktemp("upstream")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*install, *(line for line in PINNED if line.startswith("skypilot"))], check=True)
    subprocess.run([*install, "--no-deps", *(line for line in PINNED if not line.startswith("skypilot"))], check=True)
    return python


def verdicts(python: Path, stack: str, folders: list[Path], **variables: str) -> list[str | None]:
    command = [str(python), own_parsers.__file__, stack, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables)
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("stack", ["verl", "openrlhf"])
def test_a_trainer_s_own_parser_accepts_every_plan_and_no_unknown_key(
    stack: str, environment: Path, tmp_path: Path
) -> None:
    folders = exports(stack, tmp_path)
    for more in PPO[stack]:
        job = job_from({"policy": "Qwen/Qwen2.5-7B", "algorithm": "ppo", "hardware": "8xH100"}, [more])
        plan, _ = planned_for(job, best_plan(job), stack)
        folders.append(tmp_path / more)
        write_export(plan, stack, folders[-1])
    assert verdicts(environment, stack, folders) == [None] * len(folders)
    script = folders[0] / "train.sh"
    wrong = "trainer.no_such_key=1" if stack == "verl" else "--no.such_key 1"
    script.write_text(script.read_text().replace('"$@"', f'{wrong} "$@"'))
    assert verdicts(environment, stack, folders[:1]) != [None]


@pytest.mark.nightly
def test_skypilot_s_own_task_accepts_every_plan(environment: Path, tmp_path: Path) -> None:
    folders = launchers("skypilot", tmp_path)
    assert verdicts(environment, "skypilot", folders) == [None] * 30
    task = folders[0] / "task.yaml"
    task.write_text(task.read_text() + "num_hosts: 1\n")
    assert verdicts(environment, "skypilot", folders[:1]) != [None]


@pytest.mark.nightly
def test_kuberay_s_schema_accepts_every_plan(tmp_path: Path) -> None:
    schema = json.loads((ROOT / "tests" / "emit" / "rayjob_schema.json").read_text("utf-8"))
    for folder in launchers("kuberay", tmp_path):
        jsonschema.validate(YAML(typ="safe").load(folder / "rayjob.yaml"), schema)


@cache
def slurm(folder: Path) -> dict[str, str]:
    """Debian's sbatch, unpacked, with a cluster that nobody answers for."""
    subprocess.run(["apt-get", "download", *SLURM_PACKAGES], cwd=folder, check=True, capture_output=True)
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
