"""What starts a bundle on a cluster with a scheduler: SLURM, SkyPilot, KubeRay.

    DIR/bundle/       as `rlplan emit` writes it (bundle.py)
    DIR/train.sbatch, task.yaml or rayjob.yaml
    DIR/README.md     the command, and what is left to its reader

In: a Plan, and the texts of launchers.yaml. Out: that folder; EmitError for what the launcher cannot hand out. On one
host Ray starts by itself; on several it is started on each, and `rlplan run` waits for all of them. None of it has been
run on such a cluster.
"""

import json
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from rlplan.emit.bundle import write_bundle
from rlplan.errors import EmitError
from rlplan.planner.plan import Plan
from rlplan.spec.base import writing
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile

BUNDLE = "bundle"
LAUNCHERS = ("slurm", "skypilot", "kuberay")
"""Names of --target."""


class _Text(Template):
    """A text whose words to fill in are `%%word`: `$`, `@` and `%` are a shell's."""

    delimiter = "%%"


@cache
def read_launcher(target: str) -> dict[str, Any]:
    """title, file, command, note, and texts by number of hosts and kind of device."""
    launchers: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"), "the launchers")
    return launchers[target]


def render_launcher(target: str, name: str, num_hosts: int, per_host: int, gpu: str | None) -> str:
    """The file that a launcher reads, for hosts with so many devices each. gpu: the profile's name; None: a CPU host.

    Raises: EmitError.
    """
    launcher = read_launcher(target)
    kind = "amd.com/gpu" if (gpu or "").startswith("mi") else "nvidia.com/gpu"
    if "names" in launcher and gpu is not None:
        if gpu not in launcher["names"]:
            raise EmitError(
                f"{launcher['title']}'s name of {gpu} is not known",
                where=f"target {target}: resources.accelerators",
                rule=f"one of {', '.join(launcher['names'])}",
                way_out="--target slurm or --target kuberay, which ask for GPUs by their number",
            )
        kind = launcher["names"][gpu]
    resources = _Text(launcher["cpus" if gpu is None else "gpus"]).substitute(per_host=per_host, gpu=kind)
    return _Text(launcher["one_host" if num_hosts == 1 else "several_hosts"]).substitute(
        name=name,
        quoted_name=json.dumps(name),
        label="-".join("".join(one if one.isalnum() else " " for one in name.lower()).split())[:40],
        num_hosts=num_hosts,
        num_others=num_hosts - 1,
        resources=resources,
    )


def write_launcher(plan: Plan, target: str, folder: Path) -> None:
    """The folder that a launcher starts a bundle from. Raises: EmitError, SpecError."""
    launcher, hardware = read_launcher(target), plan.job.hardware
    if hardware.generation is not None or hardware.num_devices % hardware.num_hosts:
        raise EmitError(
            f"{launcher['title']} is asked for hosts that are all alike, not for {plan.devices} on "
            f"{hardware.num_hosts}",
            where=f"plan of {plan.job.name}: hardware, target {target}",
            rule="one kind of device, and as many on each host",
            way_out="leave --target out, and run the bundle on a Ray cluster of your own: rlplan run BUNDLE --address",
        )
    profile = find_profile(hardware.profile, where="hardware.profile")
    gpu = profile.gpu if isinstance(profile, NodeProfile) else hardware.profile
    per_host = hardware.num_devices // hardware.num_hosts
    on_gpus = plan.job.device_kind == "cuda"
    text = render_launcher(target, plan.job.name, hardware.num_hosts, per_host, gpu if on_gpus else None)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_bundle(plan, folder / BUNDLE)
    readme = (
        f"# {plan.job.name} by {launcher['title']}\n\nMade by rlplan from a plan for {plan.devices} on "
        f"{hardware.num_hosts} host(s). Start it with `{launcher['command']}`, {launcher['note']}.\n\n"
        f"`{BUNDLE}/` is what runs; models and data are read at the paths in it, on every host.\n"
    )
    with writing(folder):
        (folder / launcher["file"]).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(readme, encoding="utf-8")
