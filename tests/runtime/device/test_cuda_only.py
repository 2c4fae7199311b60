"""CUDA and NVML are called from two files alone, and docs/gpu.md prints every line of them that does."""

import re

from tests.docs.documentation import DOCS, ROOT, read, section

CALLS = re.compile(
    r"torch\.cuda\.|torch\.multiprocessing\.reductions|pin_memory=|\bpynvml\b|\bnvml\w*\.nvml|\.is_cuda\b|\.cuda\("
    r"|device=[\"']cuda|cudart|libcuda|PyNccl|unpinned_nccl"
)
"""Matches code that only a machine with a GPU can run."""
LAYER = ROOT / "rlplan" / "runtime" / "device"


def lines_in(name: str) -> list[str]:
    """Lines of a file that call CUDA or NVML, without comments and docstrings."""
    code = re.sub(r'(?s)""".*?"""', "", read(LAYER / name))
    lines = [line.partition("#")[0].strip() for line in code.splitlines()]
    return [line for line in lines if CALLS.search(line)]


def test_only_the_device_layer_calls_cuda() -> None:
    result = {}
    for path in sorted((ROOT / "rlplan" / "runtime").rglob("*.py")):
        code = re.sub(r'(?s)""".*?"""', "", read(path))
        lines = [line for line in code.splitlines() if CALLS.search(line.partition("#")[0]) and "where=" not in line]
        if lines and path.parent != LAYER:
            result[str(path.relative_to(ROOT))] = lines
    assert result == {}


def test_the_page_prints_every_line_that_only_a_gpu_runs() -> None:
    blocks = re.findall(r"(?ms)^```text\n(.*?)^```", section(read(DOCS / "gpu.md"), "What only a GPU runs"))
    printed = [[line.strip() for line in block.splitlines()] for block in blocks]
    assert printed == [lines_in("cuda.py"), lines_in("nvml.py")]
    assert sum(map(len, printed)) < 50
