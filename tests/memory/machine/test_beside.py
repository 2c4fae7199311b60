"""Processes beside the workers: what rewards may take, held against the requests that are really sent."""

import json

import pytest

from rlplan.memory.machine.beside import (
    DRIVER_BYTES_PER_BYTE,
    FUNCTION_PROCESS_BYTES,
    PROCESS_BYTES_PER_BYTE,
    batch_request_bytes,
    verifier_bytes,
)
from rlplan.runtime.rewards.child import MEMORY_PER_BYTE
from rlplan.runtime.rewards.judge import Response, make_request
from rlplan.runtime.rollout.experience import Prompt
from rlplan.units import MIB
from tests.factories import make_job

STEP = {
    "workload.num_prompts_per_step": 32,
    "workload.num_samples_per_prompt": 8,
    "workload.mini_batch_size": 256,
    "workload.max_prompt_len": 64,
    "workload.max_response_len": 256,
    "training.max_tokens_per_micro_batch": 320,
    "rollout.max_num_batched_tokens": 320,
    "policy.path": "examples/models/decoder-160m",
    "policy.init": "random",
    "limits.num_reward_workers": 2,
}


def test_a_request_about_a_longest_batch_is_within_what_is_counted() -> None:
    """English of four letters a token, ids of six digits, and a chat that repeats the prompt."""
    job = make_job(**STEP)
    chat = json.dumps([{"role": "user", "content": "word" * 64}])
    response = Response(Prompt("p", "word" * 64, "7", (1,), chat=chat), "word" * 256, (151_935,) * 256)
    sent = len(json.dumps({"responses": [make_request(response)] * 256, "progress": [0, 1]}))
    assert 0.6 * batch_request_bytes(job) < sent <= batch_request_bytes(job)


@pytest.mark.parametrize("signature", ["trl", "verl", "auto"])
def test_a_function_s_process_may_hold_the_whole_batch_beside_its_own_memory(signature: str) -> None:
    reward = {"kind": "function", "path": "a.py:f", "signature": signature, "memory": "1MiB"}
    job = make_job(rewards=[reward], **STEP)
    each, batch = FUNCTION_PROCESS_BYTES + MIB, batch_request_bytes(job)
    whole = each + (PROCESS_BYTES_PER_BYTE + DRIVER_BYTES_PER_BYTE) * batch
    expected = {"trl": whole, "verl": 2 * each, "auto": max(whole, 2 * each)}
    assert verifier_bytes(job) == expected[signature]
    assert MEMORY_PER_BYTE == PROCESS_BYTES_PER_BYTE, "the limit that the process is given"
