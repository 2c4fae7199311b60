"""Out-of-memory errors as people paste them: the frames of public issues and the machine's own line."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.foreign.tracebacks.read import find_out_of_memory
from rlplan.spec.files.yaml import parse_yaml
from rlplan.units import GIB

CASES: list[dict[str, Any]] = parse_yaml(
    (Path(__file__).parent / "cases.yaml").read_text("utf-8"), where="cases.yaml", what="cases"
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["url"].removeprefix("https://github.com/"))
def test_phase_allocation_and_bytes_of_a_public_traceback_are_read(case: dict[str, Any]) -> None:
    error = find_out_of_memory(case["text"])
    assert error is not None
    assert error.kind == case.get("kind", "gpu")
    assert error.phase == case.get("phase")
    assert error.words == case.get("words", error.words)
    assert error.allocation.startswith(case.get("allocation", ""))
    assert bool(error.phase) is ("phase" in case)
    assert error.columns == case.get("columns", 0)
    assert error.stack == case.get("stack", error.stack)
    assert [error.get("asked"), error.get("held")] == case.get("tokens", [0, 0])
    for name, size in case.get("gib", {}).items():
        assert error.get(name) == pytest.approx(size * GIB, rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "/var/log: Out of memory: Killed process 4242 (python3) total-vm:1kB, anon-rss:61234567kB",
        "exitcode: -9 (pid: 4242)",
        "train.sh: line 3: 4242 Killed\n",
        "Signal 9 (SIGKILL) received by PID 4242",
        "task exited with code 137",
    ],
)
def test_a_process_that_was_killed_is_the_host_s_memory(text: str) -> None:
    error = find_out_of_memory(f'File "/w/verl/workers/fsdp_workers.py", line 9, in save_checkpoint\n{text}')
    assert error is not None
    assert (error.kind, error.words) == ("host", "saving of a checkpoint")


@pytest.mark.parametrize(
    "text", ["", "step:3 - timing_s/gen:41.2", 'Traceback:\n  File "a.py", line 3, in f\nValueError: x', "Killed it!"]
)
def test_other_texts_have_no_such_error(text: str) -> None:
    assert find_out_of_memory(text) is None


def test_vllm_s_needs_of_one_sequence_are_read() -> None:
    """vLLM's v1/core/kv_cache_utils.py states needed and available bytes."""
    error = find_out_of_memory(
        "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (3.75 GiB)."
    )
    assert error is not None
    assert (error.get("tried"), error.get("free")) == pytest.approx((5.62 * GIB, 3.75 * GIB), rel=0.01)
