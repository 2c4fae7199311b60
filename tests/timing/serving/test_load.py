"""A closed loop of clients: what it comes down to in plain cases, and which way it moves."""

import pytest

from rlplan.spec.hardware.catalogue import get_gpu, get_node
from rlplan.spec.models.catalogue import find_model
from rlplan.timing.network.cluster import Cluster
from rlplan.timing.serving.counts import EngineCut, engine_counts
from rlplan.timing.serving.load import CLIENT, SPREAD, ClosedLoop, closed_loop_latency
from rlplan.timing.serving.step import EngineRates, StepLoad

RATES = EngineRates(
    engine_counts(find_model("Qwen/Qwen3-32B"), EngineCut(tp=2)),
    Cluster(get_gpu("h100-sxm", where="test"), 8, 8, get_node("dgx-h100", where="test")),
    kv_element_bytes=2,
)


def make_loop(clients: int, prompt: int, response: int, seqs: int, *, spread: float = 0.0) -> ClosedLoop:
    return ClosedLoop(clients, prompt, lambda share: response * (1 - spread * share), seqs)


def test_a_lone_client_sees_bare_steps() -> None:
    latency = closed_loop_latency(RATES, make_loop(1, 1000, 200, 100))
    assert latency.token_s == pytest.approx(RATES.seconds(StepLoad(1, 1100)), rel=0.01)
    prefill = RATES.seconds(StepLoad(0, 0, 1000, 1000**2 / 2, 1))
    assert prefill + CLIENT / 2 <= latency.first_token_s <= prefill + CLIENT * (1.5 + SPREAD / 2)


def test_tokens_wait_for_the_prompts_of_others() -> None:
    """Each of 31 others begins once while one responds: 31 prefills in 500 steps."""
    latency = closed_loop_latency(RATES, make_loop(32, 1000, 500, 1000))
    decode = RATES.seconds(StepLoad(32, 32 * 1250))
    prefill = RATES.seconds(StepLoad(32, 32 * 1250, 1000, 1000**2 / 2, 1)) - decode
    assert latency.token_s == pytest.approx(decode + 31 / 500 * prefill, rel=0.1)


def test_latencies_grow_with_clients_and_with_prompts() -> None:
    by_clients = [closed_loop_latency(RATES, make_loop(c, 1000, 500, 1000)).token_s for c in (1, 4, 16, 64, 256)]
    by_prompts = [closed_loop_latency(RATES, make_loop(16, p, 500, 1000)).token_s for p in (100, 1000, 4000, 16000)]
    assert by_clients == sorted(by_clients)
    assert by_prompts == sorted(by_prompts)


def test_equal_responses_end_together_and_their_successors_wait_for_each_other() -> None:
    """Qwen3-32B on two H100, 8 clients, 1,024 tokens in and out: 154 ms were measured where all lengths are equal, 3
    prefills of 51 ms (AIConfigurator's silicon_sample.csv)."""
    equal, spread = (
        closed_loop_latency(RATES, make_loop(8, 1024, 1024, 8, spread=spread)).first_token_s for spread in (0, 0.5)
    )
    assert equal > 1.5 * spread


def test_clients_beyond_the_cache_wait_for_a_place_and_slow_no_other() -> None:
    """Little's law: 3 of 4 wait, three times as long as a request takes."""
    full, beyond = (closed_loop_latency(RATES, make_loop(c, 1000, 500, 20)) for c in (20, 80))
    request = full.first_token_s + 500 * full.token_s
    assert beyond.token_s == pytest.approx(full.token_s, rel=0.04)
    assert beyond.first_token_s == pytest.approx(full.first_token_s + 3 * request, rel=0.15)


def test_a_simulation_is_the_same_each_time_and_ends_for_many_clients() -> None:
    loop = make_loop(3000, 200, 50, 512)
    assert closed_loop_latency(RATES, loop) == closed_loop_latency(RATES, loop)
