"""Measured profiles: what the microbenchmarks found, as hardware profiles that every command reads.

In: Measured, the bundled profile that this machine is like. Out: YAML files, checked by the reader before they get
their names. Left out: what was not measured: it stays as in the bundled profile, with its own source.
"""

import datetime as dt
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlplan.errors import HostError, SpecError
from rlplan.runtime.device.nvml import DetectedGpu
from rlplan.runtime.measure.rates import Measured, Rate
from rlplan.spec.hardware.catalogue import find_profile, get_profile, profile_paths, read_profile
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile, NodeProfile

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")
SOURCE = "rlplan profiles measure"
NODE_SUFFIX = "-node"


def check_out(path: Path) -> None:
    """Before anything is measured: a profile can be written there. Raises: SpecError."""
    name = path.stem
    for what, is_wrong, rule, way_out in (
        ("is not called *.yaml", path.suffix != ".yaml", "a profile is a .yaml file", "add .yaml"),
        (
            f"would be the profile '{name}'",
            NAME.fullmatch(name + NODE_SUFFIX) is None,
            "lower case, digits, - and ., at most 35",
            "choose another name, such as my-machine.yaml",
        ),
        ("exists", path.exists(), "nothing is overwritten", "choose another name, or move it away"),
        ("has no folder to lie in", not path.parent.is_dir(), "the folder must exist", f"make {path.parent}"),
        (
            "cannot be written",
            path.parent.is_dir() and not os.access(path.parent, os.W_OK),
            "the folder must be writable",
            "choose another folder",
        ),
    ):
        if is_wrong:
            raise SpecError(f"{path} {what}", where="--out", rule=rule, way_out=way_out)


def write_profiles(measured: Measured, gpus: tuple[DetectedGpu, ...], out: Path) -> list[Path]:
    """The profile, and on a GPU machine a node's beside it. Raises: SpecError, HostError for an unknown GPU."""
    if measured.device == "cpu":
        return [_write(cpu_data(measured, out.stem), out, _about(measured))]
    gpu = next((gpu for gpu in gpus if gpu.profile), None)
    if gpu is None or gpu.profile is None:
        raise HostError(
            f"no profile knows this GPU ({gpus[0].name if gpus else 'NVML and nvidia-smi do not answer'})",
            where="rlplan profiles measure",
            rule="a share of a peak needs the peak, which a profile says",
            way_out="`rlplan profiles detect` prints a profile to complete; put it into the folder of RLPLAN_PROFILES",
        )
    base = find_profile(gpu.profile, where="measure")
    assert isinstance(base, GpuProfile)
    paths = [_write(gpu_data(measured, base, out.stem), out, _about(measured))]
    node = _node_of(base)
    if node is not None:
        beside = out.with_name(out.stem + NODE_SUFFIX + out.suffix)
        paths.append(_write(node_data(measured, node, out.stem, len(gpus)), beside, _about(measured)))
    return paths


def cpu_data(measured: Measured, name: str) -> dict[str, Any]:
    """A CPU host like the bundled one, with this machine's memory and rates."""
    data = get_profile("cpu-host", where="measure").model_dump(mode="json", exclude_none=True)
    about = f"{measured.num_cores} cores of {measured.processor}"
    rates = {
        key: _sourced(round(found.value), found, about)
        for key, wanted in (
            ("memory_bytes_per_s", "memory_copy"),
            ("collective_bytes_per_s", "all_reduce"),
            ("disk_bytes_per_s", "disk_write"),
            ("fresh_memory_bytes_per_s", "fresh_memory"),
        )
        if (found := measured.find(wanted))
    }
    flops = {
        dtype.value: _sourced(round(found.value), found, about)
        for dtype in (ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16)
        if (found := measured.find(f"matmul_{dtype}"))
    }
    launch = measured.find("launch")
    whole = {"num_cores": _measured(measured.num_cores, "cores that this process may use"), "flops_per_s": flops}
    whole |= rates | ({"launch": _sourced(launch.value, launch, about)} if launch else {})
    memory = _measured(measured.memory_bytes, "the system's total")
    return data | {"name": name, "description": f"{about}, measured", "memory": memory, "rates": whole}


def gpu_data(measured: Measured, base: GpuProfile, name: str) -> dict[str, Any]:
    """The bundled profile with the measured shares of its peaks; what is above a peak counts as all of it."""
    data = base.model_dump(mode="json", exclude_none=True)
    data |= {"name": name, "description": f"{base.description}, measured", "driver_names": list(base.driver_names)}
    link, device = base.host_link, base.device_link
    slower = min(
        (found for found in map(measured.find, ("host_to_device", "device_to_host")) if found),
        key=lambda found: found.value,
        default=None,
    )
    peaks = (
        ("matmul", measured.find("matmul_bfloat16"), base.dense_flops_per_s.get(ComputeDtype.BFLOAT16)),
        ("memory", measured.find("memory_copy"), base.memory_bytes_per_s),
        ("host_link", slower, link.bytes_per_s if link else None),
        ("device_link", measured.find("all_reduce"), device.bytes_per_s if device else None),
    )
    shares = data.setdefault("efficiencies", {})
    for key, found, peak in peaks:
        if found and peak:
            shares[key] = _sourced(round(min(1.0, found.value / peak.value), 4), found, f"of {peak.value:.4g}")
    small = measured.find("small_all_reduce")
    if small and "serving" in data:
        data["serving"]["collective"] = _sourced(small.value, small, base.name)
    return data


def node_data(measured: Measured, base: NodeProfile, gpu: str, num_gpus: int) -> dict[str, Any]:
    """The usual node with this GPU, with as many GPUs, and the disk and the memory, that this one has."""
    data = base.model_dump(mode="json", exclude_none=True)
    data |= {
        "name": gpu + NODE_SUFFIX,
        "description": f"{base.description}, measured",
        "gpu": gpu,
        "num_gpus": num_gpus,
        "num_gpus_in_link_domain": min(base.num_gpus_in_link_domain, num_gpus),
        "host_memory": _measured(measured.memory_bytes, "the system's total"),
        "num_cores": _measured(measured.num_cores, "that may be used"),
    }
    disk = measured.find("disk_write")
    if disk and "efficiencies" in data:
        data["efficiencies"]["disk_bytes_per_s"] = _sourced(round(disk.value), disk, "this node's")
    return data


def _node_of(gpu: GpuProfile) -> NodeProfile | None:
    wanted = re.compile(rf"^gpu: *['\"]?{re.escape(gpu.name)}['\"]? *$", re.MULTILINE)
    for name, path in profile_paths().items():
        if wanted.search(path.read_text("utf-8")):
            node = find_profile(name, where=name)
            return node if isinstance(node, NodeProfile) else None
    return None


def _sourced(value: float, found: Rate, about: str) -> dict[str, Any]:
    spread = f"{found.num_samples} samples, spread {found.spread:.0%}"
    return _measured(type(value)(float(f"{value:.4g}")), f"{found.what}, {spread}; {about}")


def _measured(value: float, what: str) -> dict[str, Any]:
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return {"value": value, "provenance": "measured", "source": f"{SOURCE}: {what}", "date": today}


def _about(measured: Measured) -> str:
    machine = f"{measured.num_cores} cores of {measured.processor}, torch {measured.torch_version}"
    return f"# Written by `{SOURCE}`: {machine}.\n"


def _write(data: dict[str, Any], path: Path, comment: str) -> Path:
    """Writes beside, lets the reader check it, then gives it its name; nothing half-written is left."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width = None, 4096
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(_value_first(data), text)
    with tempfile.TemporaryDirectory(prefix=".rlplan-measure-", dir=path.parent) as folder:
        draft = Path(folder) / path.name
        draft.write_text(comment + text.getvalue(), encoding="utf-8")
        read_profile(draft)
        draft.rename(path)
    return path


def _value_first(part: Any) -> Any:
    """The same with each value before its source, as people write it."""
    if not isinstance(part, dict):
        return part
    keys = sorted(part, key=lambda key: key != "value")
    return {key: _value_first(part[key]) for key in keys}
