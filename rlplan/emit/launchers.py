"""Launchers: files that start a bundle on a cluster with a scheduler (SLURM, SkyPilot, KubeRay).

    DIR/bundle/       as `rlplan emit` writes it (bundle.py)
    DIR/train.sbatch, task.yaml or rayjob.yaml
    DIR/README.md     the command, and the settings that the user adds

In: a Plan, and the texts of launchers.yaml. Out: that folder; EmitError for hardware that the launcher cannot request.
On one host Ray starts by itself. On several, the launcher starts it on each, and `rlplan run` waits for all of them. No
launcher has been tested on such a cluster.
"""

import json
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from rlplan.emit.bundle import write_bundle
from rlplan.errors import EmitError
from rlplan.planner.plan import Plan
from rlplan.spec.base import explain_write_errors
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import NodeProfile

BUNDLE = "bundle"
LAUNCHERS = ("slurm", "skypilot", "kuberay")
"""Values of `--target`."""


class _Text(Template):
    """A template with placeholders of the form `%%word`, because shells use `$`, `@` and `%`."""

    delimiter = "%%"


@cache
def read_launcher(target: str) -> dict[str, Any]:
    """Read a launcher: title, file, command, note, and texts by number of hosts and kind of device."""
    launchers: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"), "the launchers")
    return launchers[target]


def render_launcher(target: str, name: str, num_hosts: int, per_host: int, gpu: str | None) -> str:
    """Render the launcher's file for hosts with `per_host` devices each. gpu: profile name; None on a CPU host.

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
                way_out="use --target slurm or --target kuberay, which request GPUs by number",
            )
        kind = launcher["names"][gpu]
    resources = _Text(launcher["cpus" if gpu is None else "gpus"]).substitute(per_host=per_host, gpu=kind)
    return _Text(launcher["one_host" if num_hosts == 1 else "several_hosts"]).substitute(
        name=name,
        quoted_name=json.dumps(name),
        label="-".join("".join(char if char.isalnum() else " " for char in name.lower()).split())[:40],
        num_hosts=num_hosts,
        num_others=num_hosts - 1,
        resources=resources,
    )


def write_launcher(plan: Plan, target: str, folder: Path) -> None:
    """Write a folder with a bundle and the file that a launcher starts it from. Raises: EmitError, SpecError."""
    launcher, hardware = read_launcher(target), plan.job.hardware
    if hardware.generation is not None or hardware.num_devices % hardware.num_hosts:
        raise EmitError(
            f"{launcher['title']} needs hosts that are all alike, the plan has {plan.devices} on {hardware.num_hosts}",
            where=f"plan of {plan.job.name}: hardware, target {target}",
            rule="one type of device, and the same number on each host",
            way_out="leave --target out, and run the bundle on a Ray cluster of your own: rlplan run BUNDLE --address",
        )
    profile = find_profile(hardware.profile, where="hardware.profile")
    gpu = profile.gpu if isinstance(profile, NodeProfile) else hardware.profile
    per_host = hardware.num_devices // hardware.num_hosts
    on_gpus = plan.job.device_kind == "cuda"
    text = render_launcher(target, plan.job.name, hardware.num_hosts, per_host, gpu if on_gpus else None)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_bundle(plan, folder / BUNDLE)
    readme = (
        f"# {plan.job.name} by {launcher['title']}\n\nWritten by rlplan from a plan for {plan.devices} on "
        f"{hardware.num_hosts} host(s). Start it with `{launcher['command']}`, {launcher['note']}.\n\n"
        f"`{BUNDLE}/` holds the run; it needs models and data at its paths on every host.\n"
    )
    with explain_write_errors(folder):
        (folder / launcher["file"]).write_text(text, encoding="utf-8")
        (folder / "README.md").write_text(readme, encoding="utf-8")
