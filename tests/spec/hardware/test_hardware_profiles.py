"""The bundled profiles are complete and plausible: each figure against the chip's own arithmetic.

The usual mistakes are a rate with sparsity (twice the dense one), a link's two directions added (twice one), marketing
gigabytes for what the driver reports, and a unit that is off by a thousand. Each has a test that it cannot pass.
"""

import re
from collections.abc import Iterator

import pytest

from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import SHORT_NAMES, find_profile, load_profiles, profile_folder, profile_paths
from rlplan.spec.hardware.profile import ComputeDtype, GpuProfile, NodeProfile, Sourced
from rlplan.units import GIB
from rlplan.vocabulary import Provenance

PROFILES = load_profiles()
GPUS = {name: profile for name, profile in PROFILES.items() if isinstance(profile, GpuProfile)}
NODES = {name: profile for name, profile in PROFILES.items() if isinstance(profile, NodeProfile)}
F32, TF32, BF16, F16 = ComputeDtype.FLOAT32, ComputeDtype.TFLOAT32, ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16
F8, I8, F4 = ComputeDtype.FLOAT8, ComputeDtype.INT8, ComputeDtype.FLOAT4

# Multiprocessors (or compute units), boost clock in GHz, dense 16-bit FLOP of one of them in one clock.
CORES = {
    "v100-sxm-16gb": (80, 1.53, 1024),
    "v100-sxm-32gb": (80, 1.53, 1024),
    "v100-pcie-16gb": (80, 1.38, 1024),
    "t4": (40, 1.59, 1024),
    "a10": (72, 1.695, 1024),
    "a10g": (80, 1.71, 512),
    "a30": (56, 1.44, 2048),
    "a40": (84, 1.74, 1024),
    "a100-pcie-40gb": (108, 1.41, 2048),
    "a100-sxm-40gb": (108, 1.41, 2048),
    "a100-pcie-80gb": (108, 1.41, 2048),
    "a100-sxm-80gb": (108, 1.41, 2048),
    "a800-sxm": (108, 1.41, 2048),
    "rtx-a5000": (64, 1.695, 1024),
    "rtx-a6000": (84, 1.8, 1024),
    "rtx-3060": (28, 1.777, 512),
    "rtx-3090": (82, 1.695, 512),
    "l4": (58, 2.04, 1024),
    "l40": (142, 2.49, 512),
    "l40s": (142, 2.52, 1024),
    "rtx-4070-ti": (60, 2.61, 512),
    "rtx-4080": (76, 2.505, 512),
    "rtx-4090": (128, 2.52, 512),
    "rtx-6000-ada": (142, 2.505, 1024),
    "rtx-5080": (84, 2.617, 512),
    "rtx-5090": (170, 2.407, 512),
    "rtx-pro-6000": (188, 2.617, 1024),
    "h100-sxm": (132, 1.83, 4096),
    "h100-pcie": (114, 1.62, 4096),
    "h800-sxm": (132, 1.83, 4096),
    "h200-sxm": (132, 1.83, 4096),
    "gh200-96gb": (132, 1.83, 4096),
    "mi210": (104, 1.7, 1024),
    "mi250x-gcd": (110, 1.7, 1024),
    "mi300x": (304, 2.1, 2048),
    "mi325x": (304, 2.1, 2048),
    "mi350x": (256, 2.2, 4096),
    "mi355x": (256, 2.4, 4096),
}

# Width of the memory bus in bits, data rate of one pin in Gbit/s.
MEMORY_BUS = {
    "v100-sxm-32gb": (4096, 1.752),
    "a10": (384, 12.5),
    "a30": (3072, 2.43),
    "a40": (384, 14.5),
    "a100-sxm-40gb": (5120, 2.43),
    "a100-pcie-80gb": (5120, 3.024),
    "a100-sxm-80gb": (5120, 3.186),
    "rtx-a5000": (384, 16),
    "rtx-a6000": (384, 16),
    "rtx-3060": (192, 15),
    "rtx-3090": (384, 19.5),
    "l4": (192, 12.5),
    "l40": (384, 18),
    "l40s": (384, 18),
    "rtx-4070-ti": (192, 21),
    "rtx-4080": (256, 22.4),
    "rtx-4090": (384, 21),
    "rtx-6000-ada": (384, 20),
    "rtx-5080": (256, 30),
    "rtx-5090": (512, 28),
    "rtx-pro-6000": (512, 28),
    "rtx-pro-6000-server": (512, 25),
    "h100-sxm": (5120, 5.24),
    "h200-sxm": (6144, 6.25),
    "b200": (8192, 8),
    "gb10": (256, 8.533),
    "mi210": (4096, 3.2),
    "mi250x-gcd": (4096, 3.2),
    "mi300x": (8192, 5.2),
    "mi325x": (8192, 6),
    "mi355x": (8192, 8),
}

# GiB that start-up logs show.
DRIVER_TOTALS = {
    "h100-sxm": 79.2,
    "h100-nvl": 93.1,
    "h200-sxm": 139.8,
    "b200": 178.35,
    "a100-sxm-40gb": 39.45,
    "l40s": 44.4,
    "rtx-a6000": 47.4,
    "rtx-3090": 23.58,
    "rtx-4090": 23.5,
    "t4": 14.56,
}

PCIE_GB_PER_S = {3: 15.75, 4: 31.5, 5: 63.0}
LINK_GB_PER_S = {("nvlink", 2): 25, ("nvlink", 3): 25, ("nvlink", 4): 25, ("nvlink", 5): 50, ("xgmi", 3): 50}


def list_sourced(part: Spec) -> Iterator[tuple[str, Sourced]]:
    """Every value with a source in a profile, with its key."""
    for key, value in part:
        for leaf in value.values() if isinstance(value, dict) else [value]:
            if isinstance(leaf, Sourced):
                yield key, leaf
            elif isinstance(leaf, Spec):
                yield from list_sourced(leaf)


def nominal_gigabytes(name: str) -> int:
    """Memory in gigabytes as the vendor markets it: the number in the file's first line."""
    marketing = re.match(r"# Marketing: (\d+)", profile_paths()[name].read_text(encoding="utf-8"))
    assert marketing, f"{name}: the first line says `# Marketing: <n> GB …`"
    return int(marketing.group(1))


def test_there_are_at_least_forty_gpus_and_every_kind_of_machine():
    assert len(GPUS) >= 40
    assert {gpu.kind for gpu in GPUS.values()} == {"cuda", "rocm"}
    assert {"single", "pcie", "nvlink_mesh", "nvswitch", "xgmi_mesh"} <= {node.topology for node in NODES.values()}
    assert {"infiniband", "efa", "ethernet", "roce"} == {node.network for node in NODES.values()}
    assert "cpu-host" in PROFILES


def test_every_file_is_named_like_its_profile_and_lies_with_its_kind():
    for name, path in profile_paths().items():
        assert PROFILES[name].name == name
        assert path.parent == profile_folder() / ("gpu" if name in GPUS else "node")


def test_the_power_of_a_board_is_a_data_sheet_s_and_feeds_its_rates():
    powers = {name: gpu.power for name, gpu in GPUS.items() if gpu.power is not None}
    assert len(powers) >= 35
    for name, power in powers.items():
        assert power.provenance in (Provenance.DATASHEET, Provenance.DERIVED), name
        assert 70 <= power.value <= 1400, name
        rate = GPUS[name].dense_flops_per_s.get(BF16) or GPUS[name].dense_flops_per_s[F16]
        assert 0.2e12 < rate.value / power.value < 3e12, name  # dense 16-bit FLOP of a joule, V100 to B200


def test_every_short_name_means_a_gpu_and_hides_no_profile():
    for short, name in SHORT_NAMES.items():
        assert name in GPUS
        assert short not in PROFILES


def test_no_two_profiles_have_the_same_driver_name():
    names = [name for gpu in GPUS.values() for name in gpu.driver_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", PROFILES)
def test_every_value_has_a_source_and_a_date(name: str):
    for key, value in list_sourced(PROFILES[name]):
        assert len(value.source) >= 8, key
        assert value.date is not None, key
        assert "http" not in value.source, key


@pytest.mark.parametrize("name", PROFILES)
def test_a_value_that_was_computed_says_how(name: str):
    for key, value in list_sourced(PROFILES[name]):
        if value.provenance is Provenance.DERIVED:
            assert re.search(r"halved|half|quarter|:| as |^as |less|x \d|an eighth|a 72nd", value.source), (key, value)


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_has_rates_links_and_overheads(name: str):
    gpu = GPUS[name]
    assert gpu.memory_bytes_per_s
    assert gpu.host_link
    assert F16 in gpu.dense_flops_per_s
    assert (BF16 in gpu.dense_flops_per_s) == (gpu.kind == "rocm" or float(gpu.architecture) >= 8.0)
    assert (F8 in gpu.dense_flops_per_s) <= (gpu.architecture not in {"7.0", "7.5", "8.0", "8.6", "gfx90a"})
    assert 200 << 20 <= gpu.overheads.context.value <= 1 << 30
    assert gpu.overheads.communicator_of_two.value <= gpu.overheads.communicator_of_many.value


@pytest.mark.parametrize("name", GPUS)
def test_memory_is_what_a_driver_reports_not_what_the_box_says(name: str):
    share = GPUS[name].memory.value / GIB / nominal_gigabytes(name)
    assert 0.90 <= share < 1.0, f"{share:.3f} of the nominal size"
    assert GPUS[name].memory.provenance in (Provenance.MEASURED, Provenance.DERIVED)


@pytest.mark.parametrize("name", DRIVER_TOTALS)
def test_memory_agrees_with_start_up_logs(name: str):
    assert GPUS[name].memory.value / GIB == pytest.approx(DRIVER_TOTALS[name], rel=0.002)


@pytest.mark.parametrize("name", CORES)
def test_the_dense_rate_is_cores_times_clock_times_width(name: str):
    cores, gigahertz, flops = CORES[name]
    assert GPUS[name].flops_per_s(F16) == pytest.approx(cores * gigahertz * 1e9 * flops, rel=0.02)


@pytest.mark.parametrize("name", MEMORY_BUS)
def test_the_bandwidth_is_bus_width_times_pin_rate(name: str):
    bits, gigabits = MEMORY_BUS[name]
    rate = GPUS[name].memory_bytes_per_s
    assert rate
    assert rate.value == pytest.approx(bits * gigabits / 8 * 1e9, rel=0.03)


@pytest.mark.parametrize("name", GPUS)
def test_rates_of_element_types_stand_in_the_ratios_of_tensor_cores(name: str):
    rates = {dtype: rate.value for dtype, rate in GPUS[name].dense_flops_per_s.items()}
    if BF16 in rates:
        assert rates[BF16] == rates[F16]
    for dtype, ratios in ((TF32, (0.5,)), (F8, (2,)), (I8, (1, 2, 4)), (F4, (4, 6, 8))):
        if dtype in rates:
            assert any(rates[dtype] / rates[F16] == pytest.approx(ratio, rel=0.02) for ratio in ratios), dtype
    if F32 in rates:
        assert rates[F32] <= rates.get(TF32, rates[F16]) * 1.01


@pytest.mark.parametrize("name", GPUS)
def test_compute_and_bandwidth_are_in_balance(name: str):
    """FLOP per byte: 37 for an H20, 458 for a GB10; a unit that is off by a thousand is far outside."""
    rate = GPUS[name].memory_bytes_per_s
    assert rate
    assert 30 <= GPUS[name].flops_per_s(F16) / rate.value <= 500
    assert 0.008 <= GPUS[name].memory.value / rate.value <= 0.5, "seconds to read the whole memory"


@pytest.mark.parametrize("name", GPUS)
def test_links_count_one_direction(name: str):
    host, device = GPUS[name].host_link, GPUS[name].device_link
    assert host
    if host.technology == "pcie":
        assert host.generation
        assert host.num_lanes
        one_way = PCIE_GB_PER_S[host.generation] * host.num_lanes / 16 * 1e9
        assert host.bytes_per_s.value == pytest.approx(one_way, rel=0.01)
    if device:
        one_way = 14.0625 if GPUS[name].architecture == "8.6" else xgmi_or_nvlink(name)
        assert device.bytes_per_s.value == pytest.approx(device.num_links * one_way * 1e9, rel=0.01)


def xgmi_or_nvlink(name: str) -> float:
    device = GPUS[name].device_link
    assert device
    if device.technology == "xgmi" and device.generation == 4:
        return 76.8 if GPUS[name].architecture == "gfx950" else 64
    return LINK_GB_PER_S[device.technology.removesuffix("_bridge"), device.generation]


@pytest.mark.parametrize("name", NODES)
def test_a_node_fits_its_gpu(name: str):
    node = NODES[name]
    gpu = find_profile(node.gpu, where=name)
    assert isinstance(gpu, GpuProfile)
    assert node.num_gpus_in_link_domain in (1, node.num_gpus, 72)
    peer = node.peer_bytes_per_s.value if node.peer_bytes_per_s else None
    if node.topology == "nvswitch":
        assert gpu.device_link
        assert gpu.device_link.technology == "nvlink"
        assert peer == gpu.device_link.bytes_per_s.value
    if node.topology == "xgmi_mesh":
        assert gpu.device_link
        assert peer
        assert peer * (node.num_gpus - 1) == gpu.device_link.bytes_per_s.value
    if node.topology == "pcie":
        assert gpu.host_link
        assert peer in (None, gpu.host_link.bytes_per_s.value)
    if not gpu.supports_peer_access:
        assert peer is None


@pytest.mark.parametrize("name", NODES)
def test_a_nodes_network_and_host_are_of_a_machines_size(name: str):
    node = NODES[name]
    assert 0.3e9 <= node.network_bytes_per_s.value / node.num_gpus <= 100e9
    assert 100 * GIB <= node.host_memory.value <= 4096 * GIB
    assert 16 <= node.num_cores.value <= 256
    gpu = find_profile(node.gpu, where=name)
    assert isinstance(gpu, GpuProfile)
    assert node.host_memory.value >= gpu.memory.value
