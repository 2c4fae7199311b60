"""`rlplan profiles`: lists, shows, detects and measures hardware profiles."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rlplan.errors import SpecError
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import FOLDER_VARIABLE, find_profile, load_profiles, read_profile
from rlplan.spec.hardware.profile import (
    ComputeDtype,
    CpuProfile,
    GpuProfile,
    NodeProfile,
    Profile,
    Sourced,
    SourcedByteRate,
    SourcedBytes,
    SourcedFlopRate,
    SourcedPower,
)
from rlplan.spec.hardware.rates import format_bytes_per_s, format_flops_per_s
from rlplan.units import format_bytes
from rlplan_cli.options import AsJson
from rlplan_cli.render.terminal import NARROW, note, print_json, show_table, stdout

app = typer.Typer(help="List, show, detect and measure hardware profiles.", no_args_is_help=True, rich_markup_mode=None)
UNKNOWN = "-"


@app.command("list")
def list_profiles(as_json: AsJson = False) -> None:
    """List all profiles: GPUs, then machines."""
    profiles = load_profiles()
    if as_json:
        print(json.dumps({"schema_version": 1, "profiles": [_summary(profile) for profile in profiles.values()]}))
        return
    _show_gpus([profile for profile in profiles.values() if isinstance(profile, GpuProfile)])
    _show_machines([profile for profile in profiles.values() if not isinstance(profile, GpuProfile)])
    note("memory as the driver reports it; peak rates in one direction; dense FLOP/s")


@app.command("models")
def list_models(as_json: AsJson = False) -> None:
    """List the bundled models; others are read from the hub or from a config.json."""
    from rlplan.spec.models.names import load_catalogue

    models = sorted(
        load_catalogue().values(), key=lambda model: (model.id.lower().partition("/")[0], model.num_parameters)
    )
    if as_json:
        print_json({"schema_version": 1, "models": {model.id: model.num_parameters for model in models}})
        return
    show_table(("model", "parameters"), ((model.id, f"{model.num_parameters / 1e9:.3g} B") for model in models))


@app.command("show")
def show_profile(
    name: Annotated[str, typer.Argument(help="Name of a profile, or your own YAML file.")], as_json: AsJson = False
) -> None:
    """Show one profile with the source of every value."""
    is_file = name.endswith((".yaml", ".yml"))
    try:
        profile = read_profile(Path(name)) if is_file else find_profile(name, where="command line")
    except SpecError as error:
        near = re.search(r"Did you mean '([^']+)'", error.rule)
        way_out = f"rlplan profiles show {near[1]}" if near else error.way_out
        raise SpecError(error.what, where=error.where, rule=error.rule, way_out=way_out) from None
    if as_json:
        print(profile.model_dump_json(indent=1))
        return
    stdout.print(f"{profile.name}: {profile.description}", soft_wrap=False, markup=False)
    rows = (
        (_short(path), _format(value), value.provenance, value.source + (f" ({value.date})" if value.date else ""))
        for path, value in _sourced_values(profile)
    )
    show_table(("value", "", "provenance", "source"), rows, left=("source",))
    facts = (f"{path}: {value}" for path, value in _plain_values(profile))
    stdout.print("; ".join(facts), soft_wrap=False, markup=False)


@app.command("detect")
def detect_profile(as_json: AsJson = False) -> None:
    """Detect this machine's profile: its GPUs (with a new profile to complete if unknown), or its CPU host."""
    from rlplan.runtime.host.detect import detect, new_profile_yaml

    detected = detect()
    if as_json:
        print_json(detected.as_json())
        return
    for gpu in detected.gpus:
        known = f"profile {gpu.profile}" if gpu.profile else "no profile"
        stdout.print(f"GPU {gpu.index}: {gpu.name}, {format_bytes(gpu.memory_bytes)} to CUDA: {known}", soft_wrap=True)
    for line in detected.remarks:
        note(line)
    host = detected.host
    stdout.print(
        f"host: {host.num_cores} cores, {format_bytes(host.memory_bytes)} of memory"
        + (f" (limit of the control group; the machine has {format_bytes(host.total_bytes)})" * host.is_limited)
        + ("" if detected.gpus else f": profile cpu-host with hardware.memory={host.memory_bytes >> 20}MiB"),
        soft_wrap=True,
    )
    for gpu in {gpu.name: gpu for gpu in detected.gpus if gpu.profile is None}.values():
        stdout.print("\n" + new_profile_yaml(gpu), soft_wrap=True, markup=False, end="")


@app.command("measure")
def measure_profile(
    out: Annotated[Path | None, typer.Option(help="Write the profile to this new .yaml file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few repetitions; takes seconds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's matmuls, memory, copies, collectives and disk as a profile to plan with."""
    from rlplan.runtime.host.detect import detect
    from rlplan.runtime.measure.measured_profile import check_out, write_profiles
    from rlplan.runtime.measure.microbench import QUICK, WHOLE, measure, stoppable

    if out is not None:
        check_out(out)
    with stoppable():
        measured = measure(QUICK if quick else WHOLE, out.parent if out else Path.cwd(), note)
        written = write_profiles(measured, detect().gpus, out) if out else []
    if as_json:
        print_json(measured.as_json() | {"profiles": [str(path) for path in written]})
        return
    rows = (
        (rate.name, *(_format_measured(value, rate.unit) for value in values), str(rate.num_samples), rate.what)
        for rate in measured.measurements
        for values in [(rate.value, rate.low, rate.high)]
    )
    show_table(("benchmark", "median", "low", "high", "samples", "size"), rows, left=("size",))
    for line in measured.remarks:
        note(line)
    for path in written:
        note(f"wrote {path}; set {FOLDER_VARIABLE}={path.parent.resolve()} to use it as profile '{path.stem}'")
    if out is None:
        note("use --out FILE.yaml to keep this as a profile")


def _format_measured(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1e6:.4g} us"
    return format_flops_per_s(value) if unit == "FLOP/s" else format_bytes_per_s(value)


def _show_gpus(profiles: list[GpuProfile]) -> None:
    wide = stdout.width >= NARROW
    names = ["GPU", "memory", "bandwidth", "16-bit dense", "GPU link"]
    rows = []
    for gpu in profiles:
        rate = gpu.dense_flops_per_s.get(ComputeDtype.BFLOAT16) or gpu.dense_flops_per_s.get(ComputeDtype.FLOAT16)
        links = [_format(link.bytes_per_s) if link else UNKNOWN for link in (gpu.device_link, gpu.host_link)]
        cells = [gpu.name, _format(gpu.memory), _format(gpu.memory_bytes_per_s), _format(rate)]
        rows.append([*cells, *([*links, gpu.description] if wide else links[:1])])
    show_table([*names, *(["host link", "description"] if wide else [])], rows, left=("description",))


def _show_machines(profiles: list[CpuProfile | NodeProfile]) -> None:
    wide = stdout.width >= NARROW
    names = ["machine", "GPUs", "topology", "network", "memory"]
    rows = []
    for profile in profiles:
        if isinstance(profile, NodeProfile):
            cells = [f"{profile.num_gpus}x {profile.gpu}", profile.topology, _format(profile.network_bytes_per_s)]
            cells += [_format(profile.host_memory), str(profile.num_cores.value)]
        else:
            cells = ["none", UNKNOWN, UNKNOWN, _format(profile.memory), UNKNOWN]
        rows.append([profile.name, *([*cells, profile.description] if wide else cells[:4])])
    show_table([*names, *(["cores", "description"] if wide else [])], rows, left=("description",))


def _summary(profile: Profile) -> dict[str, Any]:
    """One profile's entry in the JSON of `list`."""
    row: dict[str, Any] = {"name": profile.name, "kind": profile.kind, "description": profile.description}
    if isinstance(profile, NodeProfile):
        return row | {"memory_bytes": profile.host_memory.value, "gpu": profile.gpu, "num_gpus": profile.num_gpus}
    row["memory_bytes"] = profile.memory.value
    if isinstance(profile, GpuProfile):
        row["memory_bytes_per_s"] = profile.memory_bytes_per_s.value if profile.memory_bytes_per_s else None
        row["dense_flops_per_s"] = {dtype: rate.value for dtype, rate in profile.dense_flops_per_s.items()}
    return row


def _format(value: Sourced | None) -> str:
    if isinstance(value, SourcedBytes):
        return format_bytes(value.value)
    if isinstance(value, SourcedByteRate):
        return format_bytes_per_s(value.value)
    if isinstance(value, SourcedFlopRate):
        return format_flops_per_s(value.value)
    if isinstance(value, SourcedPower):
        return f"{value.value} W"
    return UNKNOWN if value is None else str(getattr(value, "value", UNKNOWN))


def _leaves(part: Spec, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every value of a profile with its dotted path. A value and its source stay together."""
    for key, value in part:
        inner = list(value.items()) if isinstance(value, dict) else [("", value)]
        for name, leaf in inner:
            here = (*path, key, name) if name else (*path, key)
            if isinstance(leaf, Spec) and not isinstance(leaf, Sourced):
                yield from _leaves(leaf, here)
            else:
                yield ".".join(here), leaf


def _sourced_values(profile: Profile) -> Iterator[tuple[str, Sourced]]:
    return ((path, leaf) for path, leaf in _leaves(profile) if isinstance(leaf, Sourced))


def _plain_values(profile: Profile) -> Iterator[tuple[str, str]]:
    for path, leaf in _leaves(profile):
        if not isinstance(leaf, Sourced) and path not in ("schema_version", "name", "description") and leaf is not None:
            words = " | ".join(leaf) if isinstance(leaf, tuple) else str(leaf)
            yield path, words.lower() if isinstance(leaf, bool) else words


def _short(path: str) -> str:
    """Shorten a path by the parts that are clear from the table."""
    shortened = path.removeprefix("overheads.").removeprefix("dense_flops_per_s.").removesuffix(".bytes_per_s")
    return shortened.replace("process_overheads.", "process: ").replace("process_slack.", "fragmentation: ")
