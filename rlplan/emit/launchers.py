"""What starts a bundle on a cluster with a scheduler: SLURM, SkyPilot, KubeRay.

    DIR/bundle/       as `rlplan emit` writes it (bundle.py)
    DIR/train.sbatch, task.yaml or rayjob.yaml
    DIR/README.md     the command, and what is left to its reader

In: a Plan. Out: that folder; EmitError for what the launcher cannot hand out. On one host Ray starts by itself; on
several it is started on each, and `rlplan run` waits for all of them. None of it has been run on such a cluster.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from rlplan.emit.bundle import write_bundle
from rlplan.errors import EmitError
from rlplan.planner.plan import Plan
from rlplan.spec.base import writing
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile

PORT = 6379
BUNDLE = "bundle"
SHARED = "/shared"
"""Where a volume that all pods see is mounted."""
SKY_NAMES = {
    "a10": "A10",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a10g": "A10G",
    "b200": "B200",
    "gh200-96gb": "GH200",
    "h100-sxm": "H100",
    "h200-sxm": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "rtx-4090": "RTX4090",
    "t4": "T4",
    "v100-sxm-16gb": "V100",
    "v100-sxm-32gb": "V100-32GB",
}
"""Our GPUs by SkyPilot's names."""


class _Hosts(NamedTuple):
    """What a launcher hands out. per_host: devices of each; is_gpu: whether these are GPUs."""

    name: str
    num_hosts: int
    per_host: int
    is_gpu: bool
    gpu: str


class _Launcher(NamedTuple):
    title: str
    file: str
    text: Callable[[_Hosts], str]
    command: str
    note: str


def _wait(count: int) -> str:
    """Until all hosts have joined: a run is refused where one is missing."""
    loop = f"while sum(n['Alive'] for n in ray.nodes()) < {count}: time.sleep(2)"
    return f"timeout 600 python3 -c \"import ray, time\nray.init(address='$address', log_to_driver=False)\n{loop}\""


def _slurm(hosts: _Hosts) -> str:
    asked = {"job-name": hosts.name, "nodes": hosts.num_hosts, "ntasks-per-node": 1}
    if hosts.is_gpu:
        asked["gpus-per-node"] = hosts.per_host
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in asked.items()), "#SBATCH --exclusive"]
    lines += ["set -euo pipefail", 'cd "$SLURM_SUBMIT_DIR"']
    if hosts.num_hosts == 1:
        return "\n".join([*lines, f'rlplan run {BUNDLE} "$@"']) + "\n"
    on_head = 'srun --overlap --nodes=1 --ntasks=1 --nodelist="$head"'
    others = f'srun --overlap --nodes={hosts.num_hosts - 1} --ntasks={hosts.num_hosts - 1} --exclude="$head"'
    lines += [
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=\"$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\"",
        'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        f'address="$({on_head} hostname --ip-address | cut -d " " -f 1):{PORT}"',
        f'{on_head} ray start --head --node-ip-address="${{address%:*}}" --port={PORT} --block &',
        "sleep 20",
        f'{others} ray start --address="$address" --block &',
        _wait(hosts.num_hosts),
        f'{on_head} rlplan run {BUNDLE} --address "$address" "$@"',
    ]
    return "\n".join(lines) + "\n"


def _skypilot(hosts: _Hosts) -> str:
    if hosts.is_gpu and hosts.gpu not in SKY_NAMES:
        raise EmitError(
            f"SkyPilot's name of {hosts.gpu} is not known",
            where="target skypilot: resources.accelerators",
            rule=f"one of {', '.join(SKY_NAMES)}",
            way_out="--target slurm or --target kuberay, which ask for GPUs by their number",
        )
    resources = (
        {"accelerators": f"{SKY_NAMES[hosts.gpu]}:{hosts.per_host}"} if hosts.is_gpu else {"cpus": f"{hosts.per_host}+"}
    )
    task: dict[str, Any] = {"name": hosts.name, "num_nodes": hosts.num_hosts, "workdir": ".", "resources": resources}
    lines = [f"rlplan run {BUNDLE}"]
    if hosts.num_hosts > 1:
        task |= {"envs": {"RAY_AUTH_MODE": "token"}, "secrets": {"RAY_AUTH_TOKEN": None}}
        lines = [
            'head="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
            f'address="$head:{PORT}"',
            'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then',
            '  until ray start --address="$address"; do sleep 5; done',
            "  sleep 5",  # Ray goes on by itself, and the task is over when the first host's is
            "  exit 0",
            "fi",
            f'ray start --head --node-ip-address="$head" --port={PORT}',
            _wait(hosts.num_hosts),
            f'rlplan run {BUNDLE} --address "$address"',
        ]
    return _yaml(task | {"run": LiteralScalarString("\n".join(lines) + "\n")})


def _kuberay(hosts: _Hosts) -> str:
    name = "-".join("".join(one if one.isalnum() else " " for one in hosts.name.lower()).split())[:40]
    kind = "amd.com/gpu" if hosts.gpu.startswith("mi") else "nvidia.com/gpu"
    size = {kind: hosts.per_host} if hosts.is_gpu else {"cpu": hosts.per_host}
    pod = {
        "containers": [
            {
                "name": "rlplan",
                "image": "rlplan:latest",
                "resources": {"limits": size, "requests": size},
                "volumeMounts": [{"name": "shared", "mountPath": SHARED}, {"name": "shm", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "rlplan"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    group = {"rayStartParams": {}, "template": {"spec": pod}}
    others = {"groupName": "others", "replicas": hosts.num_hosts - 1}
    others |= {"minReplicas": hosts.num_hosts - 1, "maxReplicas": hosts.num_hosts - 1}
    cluster: dict[str, Any] = {"headGroupSpec": group}
    if hosts.num_hosts > 1:
        cluster["workerGroupSpecs"] = [others | group]
    spec = {
        "entrypoint": f"cd {SHARED}/{name} && rlplan run {BUNDLE} --address $RAY_ADDRESS",
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    return _yaml({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec})


def _yaml(data: dict[str, Any]) -> str:
    """Block style, as people write it. Nothing is shared: launchers need not read aliases."""
    text, yaml = io.StringIO(), YAML()
    yaml.representer.ignore_aliases = lambda *_: True
    yaml.width = 4096
    yaml.dump(data, text)
    return text.getvalue()


LAUNCHERS = {
    "slurm": _Launcher(
        "SLURM",
        "train.sbatch",
        _slurm,
        "sbatch train.sbatch",
        "in this folder, on a file system that all hosts see, with rlplan in the environment; account, partition and "
        "time are the cluster's, and are added to the command",
    ),
    "skypilot": _Launcher(
        "SkyPilot",
        "task.yaml",
        _skypilot,
        "sky launch task.yaml",
        "in this folder; an image with rlplan, and a volume for models and runs, are added under `resources` and "
        "`file_mounts`. On several hosts also `--secret RAY_AUTH_TOKEN=$(openssl rand -hex 32)`",
    ),
    "kuberay": _Launcher(
        "KubeRay",
        "rayjob.yaml",
        _kuberay,
        "kubectl create -f rayjob.yaml",
        f"when this folder lies in the volume of the claim `rlplan`, mounted at {SHARED}, under the job's name, and "
        "`rlplan:latest` is an image that the cluster has (Dockerfile). The pods speak without a token: keep their "
        "network to themselves",
    ),
}
"""By the name of --target."""


def write_launcher(plan: Plan, target: str, folder: Path) -> None:
    """The folder that a launcher starts a bundle from. Raises: EmitError, SpecError."""
    launcher, hardware = LAUNCHERS[target], plan.job.hardware
    if hardware.generation is not None or hardware.num_devices % hardware.num_hosts:
        raise EmitError(
            f"{launcher.title} is asked for hosts that are all alike, not for {plan.devices} on {hardware.num_hosts}",
            where=f"plan of {plan.job.name}: hardware, target {target}",
            rule="one kind of device, and as many on each host",
            way_out="leave --target out, and run the bundle on a Ray cluster of your own: rlplan run BUNDLE --address",
        )
    profile = find_profile(hardware.profile, where="hardware.profile")
    gpu = profile.gpu if isinstance(profile, NodeProfile) else hardware.profile
    per_host = hardware.num_devices // hardware.num_hosts
    hosts = _Hosts(plan.job.name, hardware.num_hosts, per_host, plan.job.device_kind == "cuda", gpu)
    text = launcher.text(hosts)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_bundle(plan, folder / BUNDLE)
    readme = (
        f"# {plan.job.name} by {launcher.title}\n\nMade by rlplan from a plan for {plan.devices} on "
        f"{hardware.num_hosts} host(s). Start it with `{launcher.command}`, {launcher.note}.\n\n"
        f"`{BUNDLE}/` is what runs; models and data are read at the paths in it, on every host.\n"
    )
    with writing(folder):
        (folder / launcher.file).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(readme, encoding="utf-8")
