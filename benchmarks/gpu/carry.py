"""Archives for a GPU machine without a network: vLLM, Ray, DeepSpeed and rlplan, each small enough for one transfer.

    python benchmarks/gpu/carry.py pack [--out FOLDER]           # here, with an index of packages; `make gpu-carry`
    python benchmarks/gpu/carry.py check --python PYTHON [...]   # here: unpack and import beside that Python's torch
    python3 carry.py unpack --from FOLDER --to SITE              # there: only the standard library is used

The other machine has Python 3.12 and the packages in MACHINE_HAS (torch 2.11 among them); only what it lacks is packed.
CUDA libraries keep the code of one architecture, sm_90, because the code of all others is ten times as large.
Left out: flash attention 2 (Hopper uses 3), the kernels of DeepGEMM, QuTLASS and Marlin (FP8 blocks and 4-bit weights;
the first two need a symbol that torch 2.11 lacks), and Ray's dashboard, Java and libraries for other purposes.
"""

import argparse
import fnmatch
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "gpu.lock"
MIB = 1 << 20
LARGEST = 60 * MIB
"""Bytes of the largest archive that one transfer takes."""
ARCHITECTURE = 90
"""Compute capability of the H100 and H200, as fat binaries write it."""
KEPT_PTX_BYTES = 256 << 10
"""A fat binary without code for sm_90 keeps its PTX up to this size; above it there are only Marlin's kernels."""
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_31")

MACHINE_HAS = (
    "torch==2.11.0",
    "triton==3.6.0",
    "transformers==5.17.0",
    "accelerate",
    "peft",
    "numpy",
    "pandas",
    "psutil",
)
"""Packages of the other machine that matter here; with them come those that they need."""

ARCHIVES = {
    "vllm": ("vllm",),
    "ray": ("ray",),
    "others": (
        *("deepspeed", "hjson", "py-cpuinfo", "pydantic", "pydantic-core", "annotated-types", "ruamel-yaml", "simpy"),
        *("cbor2", "pyzmq", "openai-harmony", "openai", "httpx2", "sniffio", "msgspec", "pybase64", "cachetools"),
        *("xgrammar", "apache-tvm-ffi", "fastapi", "starlette", "partial-json-parser", "llguidance"),
        *("compressed-tensors", "loguru", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    ),
}
"""Distributions by archive: vLLM, Ray, and what those, DeepSpeed and rlplan import and the machine lacks."""

TREE = ("rlplan", "cli", "hardware_profiles", "benchmarks/gpu", "examples", "pyproject.toml")
TREE_TESTS = ("tests/gpu_contract", "tests/factories.py", "tests/runtime/host")
UNUSED = (
    *("*/tests/*", "*/test/*", "*.pyi", "*.a", "*.hpp", "*.cuh", "*/__pycache__/*"),
    *(
        "vllm/vllm-rs",
        "vllm/vllm_flash_attn/_vllm_fa2_C*",
        "vllm/third_party/deep_gemm/*",
        "vllm/third_party/fmha_sm100/*",
    ),
    *(
        "vllm/_qutlass_C*",
        "vllm/third_party/tml_fa4/*",
        "vllm/benchmarks/*",
        "vllm/entrypoints/serve/instrumentator/static/*",
    ),
    *(
        "ray/jars/*",
        "ray/cpp/*",
        "ray/dashboard/client/*",
        "ray/rllib/*",
        "ray/llm/*",
        "ray/serve/*",
        "ray/core/src/ray/gcs/*.so",
    ),
    *("tvm_ffi/3rdparty/*", "tvm_ffi/src/*", "tvm_ffi/include/*", "deepspeed/inference/v2/kernels/*"),
)
"""Files that no import and no step on one GPU asks for."""
FAT_BINARY = struct.pack("<I", 0xBA55ED50)


@dataclass(frozen=True)
class _Entry:
    """One code in a fat binary. is_ptx: PTX, or else machine code. start, end: bytes of the code in the file."""

    is_ptx: bool
    architecture: int
    start: int
    end: int


def strip_fat_binaries(data: bytearray, architecture: int = ARCHITECTURE) -> int:
    """Overwrite the code of all other architectures with zeros, in place. Returns: bytes of code that stay.

    The file keeps its length and its tables, so the loader still reads it. Source of the layout: CUDA's
    `fatbinary_section.h` and the headers that `cuobjdump -elf` lists.
    """
    stays = 0
    for entries in _list_fat_binaries(data):
        has_code = any(not entry.is_ptx and entry.architecture == architecture for entry in entries)
        loadable = [entry for entry in entries if entry.is_ptx and entry.architecture <= architecture]
        best = max((entry.architecture for entry in loadable), default=0)
        for entry in entries:
            size = entry.end - entry.start
            is_code = not entry.is_ptx and entry.architecture == architecture
            is_fallback = entry in loadable and entry.architecture == best and not has_code and size <= KEPT_PTX_BYTES
            if is_code or is_fallback:
                stays += size
            else:
                data[entry.start : entry.end] = bytes(size)
    return stays


def _list_fat_binaries(data: bytearray) -> Iterator[list[_Entry]]:
    """The codes of each fat binary in a library."""
    place = data.find(FAT_BINARY)
    while place >= 0 and place + 16 <= len(data):
        _, version, header, size = struct.unpack_from("<IHHQ", data, place)
        if version != 1 or header != 16 or place + 16 + size > len(data):
            place = data.find(FAT_BINARY, place + 4)
            continue
        end = place + 16 + size
        yield list(_list_entries(data, place + 16, end))
        place = data.find(FAT_BINARY, end)


def _list_entries(data: bytearray, start: int, end: int) -> Iterator[_Entry]:
    while start + 64 <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, start)
        (architecture,) = struct.unpack_from("<I", data, start + 28)
        first = start + header
        if not 64 <= header <= 4096 or first + size > end:
            return
        yield _Entry(kind == 1, architecture, first, first + size)
        start = first + size


def pack(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Write archives by name. Returns: bytes of each. Raises: ValueError where one is too large for a transfer."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in (name for name in names if name in ARCHIVES):
            site = Path(temporary) / name
            for wheel in _download(ARCHIVES[name], Path(temporary) / "wheels" / name):
                _unpack_wheel(wheel, site)
            sizes[name] = _write_archive(folder / f"{name}.tar.xz", site, sorted(site.rglob("*")))
    if "tree" in names:
        sizes["tree"] = _write_archive(folder / "tree.tar.xz", ROOT, _list_tree(), preset=1)
    (folder / "carry.py").write_bytes(Path(__file__).read_bytes())
    too_large = [name for name, size in sizes.items() if size > LARGEST]
    if too_large:
        raise ValueError(f"larger than {LARGEST // MIB} MiB: {', '.join(too_large)}")
    return sizes


def _list_tree() -> list[Path]:
    """The files of this checkout that a measurement needs."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard", *TREE, *TREE_TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [ROOT / name for name in tracked if name]


def _download(distributions: Sequence[str], folder: Path) -> list[Path]:
    """The wheels of distributions at their locked versions; one without a wheel (DeepSpeed) is built."""
    locked = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", LOCK.read_text("utf-8").lower().replace("_", "-"), re.MULTILINE))
    folder.mkdir(parents=True)
    wanted = [f"{name}=={locked[name]}" if name in locked else name for name in distributions]
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--only-binary=:all:"]
    binary = [name for name in wanted if not name.startswith("deepspeed")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if binary:
        subprocess.run([*pip, "download", "-q", "--no-deps", *target, "-d", str(folder), *binary], check=True)
    built = sorted(set(wanted) - set(binary))
    if built:
        subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *built], check=True)
    return sorted(folder.glob("*.whl"))


def _unpack_wheel(wheel: Path, site: Path) -> None:
    """Put a wheel's used files under the site, with its libraries stripped."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
            if info.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in UNUSED):
                continue
            content = bytearray(archive.read(info))
            if name.endswith(".so"):
                strip_fat_binaries(content)
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o755 if info.external_attr >> 16 & 0o111 else 0o644)


def _write_archive(archive: Path, root: Path, files: Sequence[Path], preset: int = 6) -> int:
    """Write files with their paths under a root. Returns: bytes of the archive."""
    with tarfile.open(archive, "w:xz", preset=preset) as out:
        for path in files:
            if path.is_file():
                out.add(path, str(path.relative_to(root)), recursive=False)
    return archive.stat().st_size


def unpack(folder: Path, site: Path) -> None:
    """Unpack the archives that lie in a folder, packages and tree side by side; those unpacked before are left out."""
    site.mkdir(parents=True, exist_ok=True)
    for archive in sorted(folder.glob("*.tar.xz")):
        done = site / f".{archive.stem}"
        if not done.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(site, filter="data")
            done.touch()


def check(folder: Path, python: str) -> int:
    """Unpack into a fresh folder, then import everything and load every library there. Returns: the exit code."""
    with tempfile.TemporaryDirectory() as site:
        unpack(folder, Path(site))
        paths = f"{site}:{site}/cli"
        environment = {"PATH": f"{Path(python).parent}:/usr/bin:/bin", "HOME": site, "PYTHONPATH": paths}
        command = [python, "-m", "benchmarks.gpu.carry_check", site]
        return subprocess.run(command, env=environment, cwd=site, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, check or unpack. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-carry")
    packing.add_argument("--only", nargs="+", choices=(*ARCHIVES, "tree"), default=(*ARCHIVES, "tree"))
    checking = verbs.add_parser("check")
    checking.add_argument("--python", required=True)
    unpacking = verbs.add_parser("unpack")
    unpacking.add_argument("--to", type=Path, required=True)
    for verb in (checking, unpacking):
        verb.add_argument("--from", dest="source", type=Path, default=ROOT / "runs" / "gpu-carry")
    options = parser.parse_args(arguments)
    if options.verb == "check":
        return check(options.source, options.python)
    if options.verb == "unpack":
        unpack(options.source, options.to)
        return 0
    for name, size in pack(options.out, options.only).items():
        print(f"{name}.tar.xz: {size / MIB:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
