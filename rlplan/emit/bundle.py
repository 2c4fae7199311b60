"""The bundle: a folder with everything that will run, readable by people and by `rlplan run`.

    DIR/plan.json               the resolved plan with its ledger
    DIR/execution.json          schedule and job
    DIR/deepspeed/<role>.json   one DeepSpeed config a trained role, and a frozen one whose ranks share it
    DIR/vllm/<role>.json        engine arguments
    DIR/ray.json                the Ray placement
    DIR/launch.sh               the one command

In: a Plan. Out: those files; and back: `read_bundle(write_bundle(plan)) == execution_spec(plan)`.
"""

import json
from pathlib import Path
from typing import Any

from rlplan.emit.execution import ExecutionSpec, execution_spec
from rlplan.emit.flags import check_keys
from rlplan.errors import EmitError, SpecError
from rlplan.planner.plan import Plan, write_plan
from rlplan.spec.base import read_json, validate, writing
from rlplan.vocabulary import Role

LAUNCH_SCRIPT = """#!/usr/bin/env bash
# Runs this bundle, exactly as it stands, with the rlplan of the active environment.
set -euo pipefail
exec rlplan run "$(dirname "$0")" "$@"
"""


def write_bundle(plan: Plan, folder: Path) -> None:
    """Write the bundle of a plan. Raises: EmitError when the folder holds something else or a key is not known,
    SpecError when it cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "execution.json").exists():
        raise EmitError(
            f"{folder} is not empty and holds no bundle",
            where=str(folder),
            rule="a bundle is written into a new folder or over an older bundle",
            way_out="name another folder",
        )
    spec = execution_spec(plan)
    check_keys(spec)
    with writing(folder):
        _write_files(plan, spec, folder)


def _write_files(plan: Plan, spec: ExecutionSpec, folder: Path) -> None:
    for name in ("deepspeed", "vllm"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for left_over in (folder / name).glob("*.json"):
            left_over.unlink()
    write_plan(plan, folder / "plan.json")
    portable = spec.model_copy(update={"job": spec.job.relative_to(folder)})
    _write_json(folder / "execution.json", json.loads(portable.model_dump_json(exclude={"deepspeed", "vllm", "ray"})))
    for role, config in spec.deepspeed.items():
        _write_json(folder / "deepspeed" / f"{role}.json", config)
    for role, arguments in spec.vllm.items():
        _write_json(folder / "vllm" / f"{role}.json", arguments)
    _write_json(folder / "ray.json", json.loads(spec.ray.model_dump_json()))
    launch = folder / "launch.sh"
    launch.write_text(LAUNCH_SCRIPT, encoding="utf-8")
    launch.chmod(0o755)


def read_bundle(folder: Path) -> ExecutionSpec:
    """The ExecutionSpec in a bundle. Raises: SpecError, EmitError."""
    if not (folder / "execution.json").is_file():
        raise SpecError(
            f"{folder} holds no bundle",
            where=str(folder / "execution.json"),
            rule="a bundle has execution.json, deepspeed/, vllm/ and ray.json",
            way_out="make one with `rlplan emit plan.json -o DIR`",
        )
    data = read_json(folder / "execution.json", "the bundle's execution.json", limit=1 << 28)
    if isinstance(data, dict):
        data["deepspeed"] = _read_folder(folder / "deepspeed")
        data["vllm"] = _read_folder(folder / "vllm")
        data["ray"] = read_json(folder / "ray.json", "the bundle's ray.json")
    spec = validate(ExecutionSpec, data, file=str(folder / "execution.json"), way_out="emit the bundle again")
    _check_roles(spec, folder)
    _check_order(spec, folder)
    _check_workers(spec, folder)
    check_keys(spec)
    return spec.model_copy(update={"job": spec.job.resolved(folder)})


def _check_order(spec: ExecutionSpec, folder: Path) -> None:
    """An edited schedule must still be one that ends: what an action waits for stands before it."""
    for part, actions in spec.schedule.parts:
        before: set[str] = set()
        for action in actions:
            unknown = [name for name in action.after if name not in before]
            if unknown:
                raise SpecError(
                    f"action '{action.id}' waits for '{unknown[0]}', which does not come before it",
                    where=f"{folder / 'execution.json'}: schedule.{part}",
                    rule="an action waits only for actions that stand before it in the same part",
                    way_out="mend `after`, or emit the bundle again",
                )
            before.add(action.id)


def _check_workers(spec: ExecutionSpec, folder: Path) -> None:
    """An edited placement must still hold the schedule's processes, each in a bundle with room for it."""
    named, wanted = [worker.process for worker in spec.ray.workers], [name for name, _ in spec.schedule.processes]
    islands = [bundle for island in spec.ray.islands for bundle in island]
    room = [bundle.get("CPU", 0.0) for bundle in spec.ray.bundles]
    if sorted(named) != sorted(wanted):
        what, rule = f"ray.json has the workers {named}", f"the schedule's processes, {wanted}"
    elif not all(0 <= worker.bundle < len(room) for worker in spec.ray.workers):
        what, rule = "a worker names a bundle that does not exist", f"bundle is 0 to {len(room) - 1}"
    elif not {worker.bundle for worker in spec.ray.workers} <= set(islands) or len(set(islands)) < len(islands):
        what, rule = f"islands are {spec.ray.islands}", "every worker's bundle lies in one island, none in two"
    elif short := [
        index
        for index, cpus in enumerate(room)
        if sum(worker.num_cpus for worker in spec.ray.workers if worker.bundle == index) > cpus + 1e-9
    ]:
        what, rule = f"bundle {short[0]} offers {room[short[0]]} CPU", "a bundle offers what its workers take together"
    else:
        return
    raise SpecError(what, where=str(folder / "ray.json"), rule=rule, way_out="mend it, or emit the bundle again")


def _check_roles(spec: ExecutionSpec, folder: Path) -> None:
    shared = [layout.role for layout in spec.schedule.layouts if layout.shares_frozen_weights]
    wanted = [("deepspeed", role, spec.deepspeed) for role in (*spec.job.trained_roles, *shared)]
    for name, role, configs in [*wanted, ("vllm", Role.POLICY, spec.vllm)]:
        if role not in configs:
            raise SpecError(
                f"{name}/{role}.json is missing from the bundle",
                where=str(folder / name),
                rule="one file for each trained role and for the rollout engine",
                way_out="emit the bundle again",
            )


def _read_folder(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise SpecError(
            f"{folder.name}/ is missing from the bundle",
            where=str(folder),
            rule="a folder of JSON files",
            way_out="emit the bundle again",
        )
    return {path.stem: read_json(path, f"the bundle's {folder.name} config") for path in sorted(folder.glob("*.json"))}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
