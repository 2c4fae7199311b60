"""A closed loop of clients: what it comes down to in plain cases, and which way it moves."""

import pytest

from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.models.catalogue import find_model
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCut, engine_counts
from rlplan.timing.serving.load import CLIENT, ClosedLoop, closed_loop_latency
from rlplan.timing.serving.step import EngineRates, StepLoad

RATES = EngineRates(
    engine_counts(find_model("Qwen/Qwen3-32B"), EngineCut(tp=2)),
    Cluster(get_gpu("h100-sxm", where="test"), 8, 8, get_node("dgx-h100", where="test")),
    kv_element_bytes=2,
)


def test_a_lone_client_sees_bare_steps() -> None:
    latency = closed_loop_latency(RATES, ClosedLoop(1, 1000, 200, 100))
    prefill = RATES.seconds(StepLoad(1, 1100, 1000, 1000**2 / 2, 1))
    assert latency.token_s == pytest.approx(RATES.seconds(StepLoad(1, 1100)))
    assert latency.first_token_s == pytest.approx(prefill + (prefill - latency.token_s) / 12 + CLIENT)


def test_tokens_wait_for_the_prompts_of_others() -> None:
    """Each of 31 others begins once while one responds: 31 prefills in 500 steps, less what falls into its own wait."""
    latency = closed_loop_latency(RATES, ClosedLoop(32, 1000, 500, 1000))
    decode = RATES.seconds(StepLoad(32, 32 * 1250))
    prefill = RATES.seconds(StepLoad(32, 32 * 1250, 1000, 1000**2 / 2, 1)) - decode
    assert decode < latency.token_s < decode + 31 / 500 * prefill
    assert latency.token_s == pytest.approx(decode + 0.85 * 31 / 500 * prefill, rel=0.03)


def test_latencies_grow_with_clients_and_with_prompts() -> None:
    by_clients = [closed_loop_latency(RATES, ClosedLoop(c, 1000, 500, 1000)).token_s for c in (1, 4, 16, 64, 256)]
    by_prompts = [closed_loop_latency(RATES, ClosedLoop(16, p, 500, 1000)).token_s for p in (100, 1000, 4000, 16000)]
    assert by_clients == sorted(by_clients)
    assert by_prompts == sorted(by_prompts)


def test_clients_beyond_the_cache_wait_for_a_place_and_slow_no_other() -> None:
    """Little's law: 3 of 4 wait, three times as long as a request takes."""
    full, beyond = (closed_loop_latency(RATES, ClosedLoop(c, 1000, 500, 20)) for c in (20, 80))
    request = full.first_token_s + 500 * full.token_s
    assert beyond.token_s == full.token_s
    assert beyond.first_token_s == pytest.approx(full.first_token_s + 3 * request, rel=0.02)
