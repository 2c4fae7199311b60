"""An out-of-memory error beside its job: the tensor in tokens, who held the rest, what makes it fit, contradictions."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlplan.foreign.check import Asked
from rlplan.foreign.source import read_source
from rlplan.foreign.tracebacks.explain import MemoryAnswer, explain_alone, explain_job, explain_script
from rlplan.foreign.tracebacks.read import find_out_of_memory
from rlplan.spec.files.job_file import load_job
from rlplan.vocabulary import MemoryKind
from tests.factories import EXAMPLES

REPORTS = Path(__file__).parents[1] / "reports"
FRAMES = """
  File "/w/verl/workers/fsdp_workers.py", line 782, in compute_log_prob
  File "/w/verl/utils/torch_functional.py", line 148, in entropy_from_logits
    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)
"""
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB. GPU 0 has a total capacity of {total} "
    "GiB of which 8.85 GiB is free. Process 23444 has 70.25 GiB memory in use. Of the allocated memory 60.49 GiB is "
    "allocated by PyTorch, and 6.77 GiB is reserved by PyTorch but unallocated."
)


def ask(text: str, file: str, hardware: str, *settings: str, overrides: Sequence[str] = ()) -> MemoryAnswer:
    error = find_out_of_memory(text)
    assert error is not None
    return explain_script(error, read_source(REPORTS / file, None, settings), Asked(hardware, None, tuple(overrides)))


def test_an_allocation_is_counted_in_tokens_of_the_job_s_vocabulary() -> None:
    """verl issue 2828: a GRPO of Qwen2.5-32B, whose vocabulary has 152,064 entries: 13.91 GiB / 4 B / 152,064."""
    answer = ask(FRAMES + TORCH.format(tried=13.91, total=79.11), "dapo795.sh", "128xA800")
    words = "13.91 GiB = 24,555 tokens x vocabulary of 152,064 in fp32: logits of the log-prob pass"
    assert answer.allocation == words
    assert answer.predicted is not None
    assert answer.predicted.action_id.startswith("score/policy")
    assert MemoryKind.WEIGHTS in {row[2] for row in answer.predicted.rows}


def test_changes_save_as_much_as_the_run_needed_beyond_its_prediction() -> None:
    answer = ask(FRAMES + TORCH.format(tried=3.1, total=79.11), "rllm29.sh", "8xA100")
    assert answer.predicted is not None
    assert answer.error.needed_bytes > answer.predicted.num_bytes
    for _, peak_bytes in answer.changes:
        assert peak_bytes <= answer.capacity_bytes - (answer.error.needed_bytes - answer.predicted.num_bytes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FRAMES + TORCH.format(tried=3.1, total=23.64), "from a GPU of 23.6 GiB, the job's has"),
        (FRAMES + TORCH.format(tried=40.0, total=79.11), "fewer than the tensor: another job or model"),
        (FRAMES.replace("verl", "openrlhf") + TORCH.format(tried=3, total=79.11), "is of OpenRLHF, the file of verl"),
        (FRAMES.replace("compute_log_prob", "update_critic") + TORCH.format(tried=3, total=79.11), "no value model"),
    ],
)
def test_a_traceback_of_another_job_is_said_to_be_one(text: str, words: str) -> None:
    assert any(words in remark for remark in ask(text, "rllm29.sh", "8xA100").remarks)


def test_half_a_traceback_says_what_it_lacks() -> None:
    error = find_out_of_memory(TORCH.format(tried=3.1, total=79.11))
    assert error is not None
    answer = explain_alone(error)
    assert "in a phase that the text does not name" in answer.headline
    assert "no known frame" in answer.remarks[-1]
    assert ask(TORCH.format(tried=3.1, total=79.11), "rllm29.sh", "8xA100").predicted is not None


def test_a_host_has_the_memory_that_ray_states() -> None:
    text = (
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\nMemory on the node "
        "where the task was running was 950.1GB / 1000.0GB (0.9501), which exceeds the memory usage threshold of 0.95."
    )
    answer = ask(text, "sl1851.sh", "8xH100")
    assert answer.headline.startswith("the host of 1000 GiB ran out of memory")
    assert answer.predicted is not None
    assert answer.predicted.scope.startswith("host")


def test_an_engine_s_refusal_is_laid_beside_the_predicted_kv_cache() -> None:
    answer = ask("ValueError: No available memory for the cache blocks.", "rllm29.sh", "8xA100")
    assert answer.headline == "vLLM has no memory for its KV cache, in the start of the engine"
    assert any("something else was on the GPU when the engine started" in remark for remark in answer.remarks)


def test_a_job_of_rlplan_answers_too() -> None:
    error = find_out_of_memory(FRAMES + TORCH.format(tried=3.1, total=79.11))
    assert error is not None
    answer = explain_job(error, load_job(EXAMPLES / "grpo-7b-8xh100.yaml"))
    assert answer.predicted is not None
    assert "3.10 GiB = " in answer.allocation
