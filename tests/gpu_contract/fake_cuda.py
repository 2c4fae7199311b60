"""A machine that looks to vLLM's CUDA build as if it had an H100: enough to load and to configure, no more.

In: nothing. Out: vLLM's platform. vLLM's libraries are linked against the driver's; a stand-in of the functions that
they name, each of which answers "no device", lets them load.
"""

import ctypes
import subprocess
from pathlib import Path

DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
)
NO_DEVICE = 100


def load_driver(folder: Path) -> None:
    """Build the stand-in of libcuda.so.1 and load it, before anything asks for the real one."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in DRIVER_FUNCTIONS))
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def take_platform() -> None:
    """Make vLLM take this machine for one H100."""
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class OneH100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return "GPU-0"

    platform = OneH100()
    vllm.platforms.__dict__.update(_current_platform=platform, current_platform=platform)
