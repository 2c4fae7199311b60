"""Imports everything that was carried, beside the torch of this Python, and loads every compiled library.

    python -m benchmarks.gpu.carry_check SITE

In: the folder where the archives were unpacked. Out: exit code 0, or an error that names what is missing. A GPU is not
needed: a stand-in of the driver lets the libraries load (tests/gpu_contract/fake_cuda.py).
"""

import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path

SCRIPTS = ("__main__", "rlplan.runtime.sandbox.runner")
"""Modules that are run as programs, never imported."""
ENGINE_MODULES = (
    *("vllm.v1.engine.core", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker", "vllm.device_allocator.cumem"),
    *("vllm.model_executor.models.qwen2", "vllm.v1.attention.backends.flash_attn", "deepspeed", "ray"),
    *("deepspeed.runtime.engine", "ray.util.placement_group"),
)


def main(site: Path) -> int:
    """Import and load. Returns: the exit code."""
    from tests.gpu_contract.fake_cuda import load_driver, take_platform

    load_driver(Path(tempfile.mkdtemp()))
    _claim_cuda_for_triton()
    import torch

    importlib.import_module("vllm")
    take_platform()
    for name in ENGINE_MODULES:
        importlib.import_module(name)
    libraries = sorted((site / "vllm").rglob("*.so"))
    for library in libraries:
        torch.ops.load_library(str(library))
    for package in ("rlplan", "rlplan_cli", "benchmarks.gpu"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith(SCRIPTS):
                importlib.import_module(module.name)
    print(
        f"torch {torch.__version__}, Python {sys.version.split()[0]}: {len(libraries)} libraries and all modules load"
    )
    return 0


def _claim_cuda_for_triton() -> None:
    """Let Triton take its CUDA driver as present: vLLM replaces Triton by a stub where it finds none."""
    from triton import backends

    for backend in backends.backends.values():
        is_cuda = "Cuda" in backend.driver.__name__
        backend.driver.is_active = staticmethod(lambda answer=is_cuda: answer)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
