"""Profiles as data: strict units, told apart by kind, read one at a time, and every mistake a message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import SpecError
from rlplan.spec.base import validate
from rlplan.spec.hardware.catalogue import (
    find_profile,
    get_gpu,
    get_node,
    get_profile,
    profile_paths,
    read_profile,
)
from rlplan.spec.hardware.profile import (
    ComputeDtype,
    CpuProfile,
    GpuProfile,
    NodeProfile,
    SourcedByteRate,
    SourcedFlopRate,
)
from rlplan.spec.hardware.rates import format_bytes_per_s, format_flops_per_s, parse_bytes_per_s, parse_flops_per_s
from rlplan.spec.hardware.typed import parse_pools

ROOT = Path(__file__).resolve().parents[3]


def gpu_data(**overrides: Any) -> dict[str, Any]:
    """A GPU profile as parsed YAML with only what has to be there; `...` removes a key."""

    def value(number: Any) -> dict[str, Any]:
        return {"value": number, "provenance": "assumed", "source": "made up for a test"}

    sizes = ("context", "allocator_granularity", "communicator_of_two", "communicator_of_many")
    data: dict[str, Any] = {
        "schema_version": 1,
        "name": "test-gpu",
        "kind": "cuda",
        "description": "made up",
        "driver_names": ["Test GPU"],
        "architecture": "9.0",
        "memory": value("79.1GiB"),
        "supports_sleep": True,
        "supports_peer_access": True,
        "shares_host_memory": False,
        "overheads": {size: value("2MiB") for size in sizes},
    }
    return {key: part for key, part in (data | overrides).items() if part is not ...}


def write(folder: Path, data: dict[str, Any], name: str = "test-gpu.yaml") -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


# ------------------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "rate"),
    [("3.35TB/s", 3_350_000_000_000), ("31.5 GB/s", 31_500_000_000), ("100MB/s", 100_000_000), (5, 5)],
)
def test_a_byte_rate_has_a_decimal_unit_or_is_a_number(text: str | int, rate: int):
    assert parse_bytes_per_s(text) == rate


@pytest.mark.parametrize(
    "text", ["80G", "3.35TB", "3.35 TiB/s", "400Gb/s", "400Gbit/s", "1e9", "-1GB/s", "0GB/s", "", "GB/s", 0, -1, True]
)
def test_any_other_byte_rate_is_refused_with_the_rule(text: str | int):
    with pytest.raises(ValueError, match=r"^a rate is"):
        parse_bytes_per_s(text)


@pytest.mark.parametrize("rate", [None, 1.5, [1], {}])
def test_a_byte_rate_of_another_type_is_refused(rate: Any):
    with pytest.raises(ValueError, match="a rate is an integer"):
        parse_bytes_per_s(rate)


@pytest.mark.parametrize("text", ["312", "312T", "312TFLOPS", "312 TFLOPs", "312TOPS", "2PF"])
def test_a_flop_rate_says_per_second(text: str):
    with pytest.raises(ValueError, match="312TFLOP/s"):
        parse_flops_per_s(text)


@given(st.integers(1, 9000), st.sampled_from(["GFLOP/s", "TFLOP/s", "PFLOP/s"]))
def test_what_is_shown_of_four_figures_is_what_was_read(number: int, unit: str):
    rate = parse_flops_per_s(f"{number}{unit}")
    assert parse_flops_per_s(format_flops_per_s(rate)) == rate


@given(st.integers(1, 9999), st.sampled_from(["MB/s", "GB/s", "TB/s"]))
def test_a_byte_rate_survives_its_text(number: int, unit: str):
    rate = parse_bytes_per_s(f"{number}{unit}")
    assert parse_bytes_per_s(format_bytes_per_s(rate)) == rate


@pytest.mark.parametrize("kind", [SourcedByteRate, SourcedFlopRate])
def test_a_value_without_a_source_is_refused(kind: type[SourcedByteRate]):
    with pytest.raises(SpecError, match="'source' is missing"):
        validate(kind, {"value": 5, "provenance": "measured"}, file="x")


@pytest.mark.parametrize("date", ["yesterday", "24", "2024-1", "2024/01"])
def test_a_date_is_a_year_a_month_or_a_day(date: str):
    with pytest.raises(SpecError, match="date"):
        validate(SourcedByteRate, {"value": 5, "provenance": "measured", "source": "made up", "date": date}, file="x")


# ------------------------------------------------------------------------------------------------------------- kinds


def test_the_kind_says_what_a_profile_is():
    assert isinstance(find_profile("cpu-host", where=""), CpuProfile)
    assert isinstance(find_profile("h100-sxm", where=""), GpuProfile)
    assert isinstance(find_profile("mi300x", where=""), GpuProfile)
    assert isinstance(find_profile("dgx-h100", where=""), NodeProfile)


@pytest.mark.parametrize("kind", [None, "gpu", "CUDA", 7, ["cuda"], {"cuda": 1}])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: Any, tmp_path: Path):
    with pytest.raises(SpecError, match="cpu, cuda, rocm, node"):
        read_profile(write(tmp_path, gpu_data(kind=kind)))


def test_a_missing_kind_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="'kind' is missing"):
        read_profile(write(tmp_path, gpu_data(kind=...)))


def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path):
    path = tmp_path / "list.yaml"
    path.write_text("[1, 2]")
    with pytest.raises(SpecError, match="not a mapping"):
        read_profile(path)


def test_a_profile_is_named_like_its_file(tmp_path: Path):
    with pytest.raises(SpecError, match="the file is other"):
        read_profile(write(tmp_path, gpu_data(), "other.yaml"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"memory": {"value": "80G", "provenance": "measured", "source": "made up"}}, "memory.value"),
        ({"memory_bytes_per_s": {"value": "3.35T", "provenance": "datasheet", "source": "made up"}}, "memory_bytes"),
        ({"dense_flops_per_s": {"bf16": {"value": 1, "provenance": "datasheet", "source": "made up"}}}, "dense_flops"),
        ({"architecture": "hopper"}, "architecture"),
        ({"driver_names": []}, "driver_names"),
        ({"name": "Test GPU"}, "name"),
        ({"schema_version": 2}, "schema_version"),
        ({"colour": "green"}, "colour"),
        ({"overheads": ...}, "overheads"),
        ({"supports_sleep": "yes"}, "supports_sleep"),
    ],
)
def test_a_wrong_value_is_refused_with_its_file_and_key(change: dict[str, Any], key: str, tmp_path: Path):
    path = write(tmp_path, gpu_data(**change))
    with pytest.raises(SpecError) as caught:
        read_profile(path)
    assert str(path) in caught.value.where
    assert key in str(caught.value)
    assert caught.value.way_out


def test_a_gpu_without_rates_is_enough_for_memory_and_says_what_it_lacks(tmp_path: Path):
    gpu = read_profile(write(tmp_path, gpu_data()))
    assert isinstance(gpu, GpuProfile)
    assert gpu.memory.value == int(79.1 * 2**30)
    with pytest.raises(SpecError, match="'test-gpu' has no bfloat16 rate"):
        gpu.flops_per_s(ComputeDtype.BFLOAT16)


@pytest.mark.parametrize("name", ["h100-sxm", "mi250x-gcd", "gb200-nvl72", "cpu-host"])
def test_a_profile_survives_json(name: str):
    profile = find_profile(name, where="")
    assert validate(type(profile), json.loads(profile.model_dump_json()), file="x") == profile


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100", "h100-sxm"),
        ("h100_nvl", "h100-nvl"),
        (" A100-40GB ", "a100-sxm-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("MI300X", "mi300x"),
        ("dgx-h100", "h100-sxm"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(name: str, meant: str):
    assert get_gpu(name, where="").name == meant


def test_an_unknown_name_is_refused_with_near_ones():
    with pytest.raises(SpecError, match="h100") as caught:
        find_profile("h101", where="hardware.profile")
    assert caught.value.where == "hardware.profile"
    assert "profiles list" in caught.value.way_out


@pytest.mark.parametrize("name", ["", "x" * 100_000, "../node/cpu-host", "cpu-host.yaml", "\0", "日本"])
def test_a_strange_name_is_only_unknown(name: str):
    with pytest.raises(SpecError, match="is unknown") as caught:
        find_profile(name, where="")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("get", "name"), [(get_profile, "h100"), (get_gpu, "cpu-host"), (get_node, "h100-sxm")])
def test_a_profile_of_another_kind_is_refused(get: Any, name: str):
    with pytest.raises(SpecError, match="is of kind"):
        get(name, where="")


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("8xH100", 8, "h100-sxm"), ("1 x rtx-4090", 1, "rtx-4090"), ("16384xb200", 16384, "b200")],
)
def test_gpus_are_a_number_and_a_name(text: str, count: int, name: str):
    (group,) = parse_pools(text, where="--gpus")
    assert (group.num_gpus, group.profile) == (count, name)


def test_nodes_are_counted_with_all_their_gpus():
    (group,) = parse_pools("2xdgx-h100", where="--gpus")
    assert (group.num_gpus, group.profile) == (16, "dgx-h100")
    assert get_gpu(group.profile, where="--gpus").name == "h100-sxm"


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("H100x8", 8, "h100-sxm"),
        ("H100:8", 8, "h100-sxm"),
        ("a100-80gb * 2", 2, "a100-sxm-80gb"),
        ("4090x2", 2, "rtx-4090"),
        ("NVIDIA H100 80GB:4", 4, "h100-sxm"),
        ("mi250x:8", 8, "mi250x-gcd"),
    ],
)
def test_a_name_may_stand_before_its_number_where_that_means_one_thing(text: str, count: int, name: str):
    (group,) = parse_pools(text, where="--gpus")
    assert (group.num_gpus, group.profile) == (count, name)


def test_gpus_that_could_mean_two_things_or_are_not_counted_are_refused_with_what_to_write():
    with pytest.raises(SpecError, match="names no GPUs"):
        parse_pools("4090x3090", where="--gpus")
    with pytest.raises(SpecError, match="leaves open: one rtx-4090") as caught:
        parse_pools("4090", where="--gpus")
    assert caught.value.way_out == "write 1x4090"


@pytest.mark.parametrize("text", ["", "h100", "8", "0xh100", "-1xh100", "8xh100x", "1e3xh100", "9999999xh100"])
def test_anything_else_names_no_gpus(text: str):
    with pytest.raises(SpecError):
        parse_pools(text, where="--gpus")


def test_two_groups_of_gpus_are_named_with_a_plus():
    pools = parse_pools("8xH100 + 2xdgx-h100", where="--gpus")
    assert [(group.num_gpus, group.profile) for group in pools] == [(8, "h100-sxm"), (16, "dgx-h100")]
    assert len(parse_pools("8xH100", where="--gpus")) == 1


@pytest.mark.parametrize("text", ["8xh100 +", "+", "8xh100 + 8xh100 + 8xh100", "8xh100 + 0xl40s", "8xh100 - 8xl40s"])
def test_groups_that_are_no_gpus_are_refused(text: str):
    with pytest.raises(SpecError):
        parse_pools(text, where="--gpus")


# ----------------------------------------------------------------------------------------------------------- loading

RUN_AND_REPORT_WHAT_IS_OPENED = """
import atexit, json, sys
opened = []
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
atexit.register(lambda: print(json.dumps(opened), file=sys.stderr))
from rlplan_cli.app import main
main()
"""


def test_an_estimate_reads_one_profile_and_no_other():
    command = [sys.executable, "-c", RUN_AND_REPORT_WHAT_IS_OPENED, "estimate", "examples/quickstart.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    opened = json.loads(done.stderr.splitlines()[-1])
    assert {Path(path).stem for path in opened if Path(path).stem in profile_paths()} == {"cpu-host"}


def test_hosts_times_gpus_are_all_of_them_on_these_hosts() -> None:
    (group,) = parse_pools("32x8xH200", where="--gpus")
    assert (group.num_gpus, group.num_hosts, group.profile) == (256, 32, "h200-sxm")
