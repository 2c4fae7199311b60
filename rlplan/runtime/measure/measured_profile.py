"""Measured profiles: the rates of the microbenchmarks as hardware profiles that every command reads.

Values that were not measured stay as in the bundled profile, with their own source.
In: Measured, and the bundled profile of this kind of machine. Out: YAML files, validated before they get their names.
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
from rlplan.runtime.measure.microbench import Measured, Rate
from rlplan.spec.hardware.catalogue import find_profile, get_profile, profile_paths, read_profile
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile, NodeProfile

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")
SOURCE = "rlplan profiles measure"
NODE_SUFFIX = "-node"


def check_out(path: Path) -> None:
    """Check, before the measuring, that a profile can be written there. Raises: SpecError."""
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
        ("is in no existing folder", not path.parent.is_dir(), "the folder must exist", f"make {path.parent}"),
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
    """Write the profile, and on a GPU machine a node's profile too. Raises: SpecError, HostError for an unknown GPU."""
    if measured.device == "cpu":
        return [_write(cpu_data(measured, out.stem), out, _about(measured))]
    gpu = next((gpu for gpu in gpus if gpu.profile), None)
    if gpu is None or gpu.profile is None:
        raise HostError(
            f"no profile knows this GPU ({gpus[0].name if gpus else 'NVML and nvidia-smi do not answer'})",
            where="rlplan profiles measure",
            rule="measured rates are shares of the profile's peaks, so the GPU needs a profile",
            way_out="complete the profile that `rlplan profiles detect` prints; put it into the RLPLAN_PROFILES folder",
        )
    base = find_profile(gpu.profile, where="measure")
    assert isinstance(base, GpuProfile)
    paths = [_write(gpu_data(measured, base, out.stem), out, _about(measured))]
    node = _find_node(base)
    if node is not None:
        node_file = out.with_name(out.stem + NODE_SUFFIX + out.suffix)
        paths.append(_write(node_data(measured, node, out.stem, len(gpus)), node_file, _about(measured)))
    return paths


def cpu_data(measured: Measured, name: str) -> dict[str, Any]:
    """Build the profile of a CPU host from the bundled one, with this machine's memory and rates."""
    data = get_profile("cpu-host", where="measure").model_dump(mode="json", exclude_none=True)
    about = f"{measured.num_cores} cores of {measured.processor}"
    rates = {
        key: _add_source(round(measured_rate.value), measured_rate, about)
        for key, wanted in (
            ("memory_bytes_per_s", "memory_copy"),
            ("collective_bytes_per_s", "all_reduce"),
            ("disk_bytes_per_s", "disk_write"),
            ("fresh_memory_bytes_per_s", "fresh_memory"),
        )
        if (measured_rate := measured.find(wanted))
    }
    flops = {
        dtype.value: _add_source(round(measured_rate.value), measured_rate, about)
        for dtype in (ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16)
        if (measured_rate := measured.find(f"matmul_{dtype}"))
    }
    launch = measured.find("launch")
    cores = _note_measured(measured.num_cores, "cores that this process may use")
    all_rates = {"num_cores": cores, "flops_per_s": flops, **rates}
    all_rates |= {"launch": _add_source(launch.value, launch, about)} if launch else {}
    memory = _note_measured(measured.memory_bytes, "the system's total")
    return data | {"name": name, "description": f"{about}, measured", "memory": memory, "rates": all_rates}


def gpu_data(measured: Measured, base: GpuProfile, name: str) -> dict[str, Any]:
    """Build the profile of a GPU from the bundled one, with the measured shares of its peaks (at most 1)."""
    data = base.model_dump(mode="json", exclude_none=True)
    data |= {"name": name, "description": f"{base.description}, measured", "driver_names": list(base.driver_names)}
    link, device = base.host_link, base.device_link
    slower = min(
        (direction for direction in map(measured.find, ("host_to_device", "device_to_host")) if direction),
        key=lambda direction: direction.value,
        default=None,
    )
    peaks = (
        ("matmul", measured.find("matmul_bfloat16"), base.dense_flops_per_s.get(ComputeDtype.BFLOAT16)),
        ("memory", measured.find("memory_copy"), base.memory_bytes_per_s),
        ("host_link", slower, link.bytes_per_s if link else None),
        ("device_link", measured.find("all_reduce"), device.bytes_per_s if device else None),
    )
    shares = data.setdefault("efficiencies", {})
    for key, reached, peak in peaks:
        if reached and peak:
            shares[key] = _add_source(round(min(1.0, reached.value / peak.value), 4), reached, f"of {peak.value:.4g}")
    small = measured.find("small_all_reduce")
    if small and "serving" in data:
        data["serving"]["collective"] = _add_source(small.value, small, base.name)
    return data


def node_data(measured: Measured, base: NodeProfile, gpu: str, num_gpus: int) -> dict[str, Any]:
    """Build the profile of a node from the bundled one, with this machine's number of GPUs, memory and disk."""
    data = base.model_dump(mode="json", exclude_none=True)
    data |= {
        "name": gpu + NODE_SUFFIX,
        "description": f"{base.description}, measured",
        "gpu": gpu,
        "num_gpus": num_gpus,
        "num_gpus_in_link_domain": min(base.num_gpus_in_link_domain, num_gpus),
        "host_memory": _note_measured(measured.memory_bytes, "the system's total"),
        "num_cores": _note_measured(measured.num_cores, "that may be used"),
    }
    disk = measured.find("disk_write")
    if disk and "efficiencies" in data:
        data["efficiencies"]["disk_bytes_per_s"] = _add_source(round(disk.value), disk, "this node's")
    return data


def _find_node(gpu: GpuProfile) -> NodeProfile | None:
    wanted = re.compile(rf"^gpu: *['\"]?{re.escape(gpu.name)}['\"]? *$", re.MULTILINE)
    for name, path in profile_paths().items():
        if wanted.search(path.read_text("utf-8")):
            node = find_profile(name, where=name)
            return node if isinstance(node, NodeProfile) else None
    return None


def _add_source(value: float, measured_rate: Rate, about: str) -> dict[str, Any]:
    spread = f"{measured_rate.num_samples} samples, spread {measured_rate.spread:.0%}"
    return _note_measured(type(value)(float(f"{value:.4g}")), f"{measured_rate.what}, {spread}; {about}")


def _note_measured(value: float, what: str) -> dict[str, Any]:
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return {"value": value, "provenance": "measured", "source": f"{SOURCE}: {what}", "date": today}


def _about(measured: Measured) -> str:
    machine = f"{measured.num_cores} cores of {measured.processor}, torch {measured.torch_version}"
    return f"# Written by `{SOURCE}`: {machine}.\n"


def _write(data: dict[str, Any], path: Path, comment: str) -> Path:
    """Write a draft, validate it by reading it, then rename it: no partial or invalid profile is ever left."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    # None writes each innermost mapping on one line, as in the bundled profiles
    yaml.default_flow_style, yaml.width = None, 4096
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(_value_first(data), text)
    # beside the target, because a rename cannot cross file systems
    with tempfile.TemporaryDirectory(prefix=".rlplan-measure-", dir=path.parent) as folder:
        draft = Path(folder) / path.name
        draft.write_text(comment + text.getvalue(), encoding="utf-8")
        read_profile(draft)
        draft.rename(path)
    return path


def _value_first(part: Any) -> Any:
    """Put the key `value` before its source in every mapping, as in the bundled profiles."""
    if not isinstance(part, dict):
        return part
    keys = sorted(part, key=lambda key: key != "value")
    return {key: _value_first(part[key]) for key in keys}
