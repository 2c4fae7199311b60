"""Seconds of a CPU job: small cases by hand, what must grow with what, and an action for each cost."""

from dataclasses import replace
from typing import Any

import pytest

from rlplan.dataflow.schedule import Schedule
from rlplan.planner.plan import Plan
from rlplan.spec.files.job_file import load_job
from rlplan.spec.hardware.catalogue import get_profile
from rlplan.spec.hardware.profile import CpuLatencies
from rlplan.spec.resolved import resolve_on_cpu
from rlplan.timing.cost import Resource
from rlplan.timing.cpu.actions import CpuTimes, action_costs, predict_job
from rlplan.timing.cpu.eager import PassCounts
from rlplan.timing.cpu.engine import CpuEngine, Requests, time_weight_sync
from rlplan.timing.cpu.host import CpuHost, read_host
from tests.factories import EXAMPLES, QUICKSTART, make_job, make_model, make_plan, make_profile
from tests.repository.at_night import mark_nightly


def round_host(**overrides: Any) -> CpuHost:
    """4 cores, 400 FLOP/s, 40 B/s of memory, 8 fresh, 2 collective, 1 disk; latencies of 0."""
    zero = {"value": 0.0, "provenance": "assumed", "source": "made up for a test"}
    latencies = CpuLatencies.model_validate(dict.fromkeys(CpuLatencies.model_fields, zero))
    return replace(CpuHost(4, 400.0, 40.0, 8.0, 2.0, 1.0, 0.0, latencies), **overrides)


def bundled_host() -> CpuHost:
    host = read_host(get_profile("cpu-host", where="test"))
    assert host is not None
    return host


def sync_s(actions: CpuTimes) -> float:
    """Seconds of a weight sync that is not the first."""
    return time_weight_sync(actions.job, actions.engine, actions.host).seconds


def times(host: CpuHost | None = None, **overrides: Any) -> CpuTimes:
    plan = make_plan(**overrides)
    return CpuTimes(plan.job, plan.job.load_model(), host or bundled_host(), plan.schedule)


def test_a_process_has_its_threads_part_of_the_host_and_less_beside_others() -> None:
    host = round_host()
    work = PassCounts(flops=1200, fresh_bytes=16, read_bytes=80, num_ops=0)
    alone = host.share(1).pass_cost(work)
    assert alone.parts == {Resource.COMPUTE: 12, Resource.MEMORY: 2, Resource.HOST: 2, Resource.LATENCY: 0}
    assert host.share(4).pass_cost(work).parts[Resource.COMPUTE] == 3
    assert host.share(4, 2).pass_cost(work).parts[Resource.COMPUTE] == 6
    crowd = host.share(1, 8).pass_cost(work).parts
    assert (crowd[Resource.COMPUTE], crowd[Resource.MEMORY], crowd[Resource.HOST]) == (24, 16, 4)


def test_collectives_send_what_a_ring_sends() -> None:
    share = round_host().share(1, 4)
    assert share.time_all_reduce(80).seconds == 2 * 80 * 3 / 4 / 2
    assert share.time_all_gather(80).seconds == 80 * 3 / 4 / 2
    assert round_host().share(1, 1).time_all_reduce(80).seconds == 0


def test_an_optimizer_step_by_hand() -> None:
    """Two ranks: 56 bytes of each parameter of a half, twice 4 of every one copied out of the gathered buffer."""
    subject = times(round_host(num_cores=2))
    count = subject.model.num_parameters
    parts = subject.optimizer_cost().parts
    assert parts[Resource.MEMORY] == pytest.approx((56 * count / 2 + 2 * 4 * count) * 2 / 40)
    assert parts[Resource.HOST] == pytest.approx((4 * count / 2 + 4 * count) / 8)
    assert parts[Resource.NETWORK] == pytest.approx(4 * count / 2 / 2)


def test_a_decode_step_reads_the_weights_once_and_multiplies_for_each_sequence() -> None:
    model, share = make_model(), round_host().share(4)
    engine = CpuEngine(model, make_job().rollout, share)
    single, two = engine.step_cost(1, 1, 0).parts, engine.step_cost(2, 2, 0).parts
    assert single[Resource.MEMORY] == two[Resource.MEMORY] == 4 * (1536 + 70 * 8) / 40
    assert two[Resource.COMPUTE] == 2 * single[Resource.COMPUTE] == pytest.approx(4 * (1536 + 70 * 8) / 400)


def test_a_small_kv_cache_or_max_num_seqs_makes_more_steps() -> None:
    model, host = make_job().load_model(), bundled_host()
    requests = Requests(32, 8, 8, 24)

    def seconds(**overrides: Any) -> float:
        return CpuEngine(model, make_job(rollout=overrides).rollout, host.share(2)).cost(requests).seconds

    assert seconds(max_num_seqs=32) > seconds(max_num_seqs=128) > seconds(max_num_seqs=256)
    assert seconds(kv_cache_memory="2MiB") > seconds(kv_cache_memory="64MiB")
    engine = CpuEngine(model, make_job(rollout={"kv_cache_memory": "2MiB"}).rollout, host.share(2))
    assert engine.count_concurrent(requests) == 2 * 2**20 // (32 * 4 * 2 * 2 * 32 * 4) - 1, (
        "a block of 32 tokens each, one spare"
    )


@pytest.mark.parametrize("rollout", [{"dtype": "bfloat16"}, {"tp": 2}])
def test_keys_of_half_the_bytes_let_a_cache_hold_twice_the_sequences(rollout: dict[str, Any]) -> None:
    requests, job = Requests(32, 8, 8, 24), make_job(rollout={"kv_cache_memory": "2MiB"})
    other = make_job(rollout={"kv_cache_memory": "2MiB", **rollout})
    counts = [
        CpuEngine(job.load_model(), variant.rollout, round_host().share(2)).count_concurrent(requests)
        for variant in (job, other)
    ]
    assert counts == [31, 63]


@pytest.mark.parametrize("path", [QUICKSTART, EXAMPLES / "memory-bound.yaml"], ids=lambda path: path.stem)
def test_every_action_has_a_cost_and_every_cost_an_action(path: Any) -> None:
    job = resolve_on_cpu(load_job(path))
    plan = make_plan()
    schedule: Schedule = plan.schedule
    costs = action_costs(job, job.load_model(), bundled_host(), schedule)
    assert set(costs) == {(part, action.id) for part, actions in schedule.parts for action in actions}
    assert all(cost.seconds >= 0 for cost in costs.values())
    timing = predict_job(job, job.load_model(), job.load_profile(), schedule)
    assert timing is not None
    assert all(timing.cost(part, action_id) == cost for (part, action_id), cost in costs.items())


@pytest.mark.parametrize(
    "overrides",
    mark_nightly(
        [
            {"workload.max_response_len": 40},
            {"workload.num_prompts_per_step": 8},
            {"workload.num_samples_per_prompt": 8},
        ],
        but=1,
    ),
    ids=str,
)
def test_more_or_longer_rollouts_never_take_less_time(overrides: dict[str, Any]) -> None:
    for method in ("generate_cost", "score_cost", "train_cost"):
        assert getattr(times(**overrides), method)().seconds >= getattr(times(), method)().seconds, method


@pytest.mark.parametrize(
    "rate", mark_nightly(["flops_per_s", "memory_bytes_per_s", "fresh_bytes_per_s", "collective_bytes_per_s"], but=2)
)
def test_a_slower_host_is_never_faster(rate: str) -> None:
    slow = replace(bundled_host(), **{rate: getattr(bundled_host(), rate) / 2})
    for method in ("generate_cost", "score_cost", "train_cost", "optimizer_cost"):
        assert getattr(times(slow), method)().seconds >= getattr(times(), method)().seconds, method
    assert sync_s(times(slow)) >= sync_s(times())


def test_the_usual_length_counts_where_the_job_says_one_and_the_longest_otherwise() -> None:
    long = times(**{"workload.max_response_len": 40})
    stated = times(**{"workload.max_response_len": 40, "workload.mean_response_len": 12})
    assert stated.generate_cost() == times().generate_cost()
    assert stated.generate_cost().seconds < long.generate_cost().seconds


def test_evaluation_is_beside_the_step_and_the_last_one_is_not_repeated() -> None:
    plan: Plan = make_plan(**{"workload.num_steps": 4, "workload.evaluate_every": 2})
    timing = plan.timing
    assert timing is not None
    assert "evaluate" not in [action.action_id for action in timing.step.actions]
    assert [action.action_id for action in timing.sometimes.actions] == ["evaluate"]
    assert timing.finish.actions[0].cost.seconds == 0
    evaluation = timing.sometimes.actions[0].cost.seconds
    expected = timing.start.seconds + 4 * timing.step.seconds + 2 * evaluation + timing.finish.seconds
    assert timing.run_s(plan.schedule, 4) == pytest.approx(expected)


def test_scores_and_rewards_overlap_in_a_step() -> None:
    timing = make_plan().timing
    assert timing is not None
    at = {action.action_id: action for action in timing.step.actions}
    assert at["verify"].start_s == at["score/reference"].start_s == at["generate"].end_s
    assert at["compute_advantages"].start_s == max(at["verify"].end_s, at["score/reference"].end_s)


def test_a_process_that_starts_by_itself_starts_sooner_than_beside_others() -> None:
    memory = {"policy.path": str(EXAMPLES / "models" / "decoder-160m"), "policy.init": "random"}
    room = {"hardware.memory": "16GiB"}
    seconds = {}
    for offload in ("none", "disk"):
        timing = make_plan(**memory, **room, placement={"placement": "colocated", "offload": offload}).timing
        assert timing is not None
        cost = timing.cost("start", "start_scorer/reference")
        assert cost is not None
        seconds[offload] = cost.seconds
    assert seconds["disk"] < seconds["none"]


def test_a_profile_without_rates_gives_no_times() -> None:
    plan = make_plan()
    assert predict_job(plan.job, plan.job.load_model(), make_profile(), plan.schedule) is None


def test_an_evaluation_is_timed_by_its_data_sets_and_samples() -> None:
    def seconds(**overrides: Any) -> float:
        timing = make_plan(**{"workload.num_heldout_prompts": 64, **overrides}).timing
        assert timing is not None
        (evaluate,) = [action for action in timing.sometimes.actions if action.action_id == "evaluate"]
        return evaluate.cost.seconds

    sampled = seconds(**{"workload.num_evaluation_samples": 8, "workload.evaluation_temperature": 1.0})
    file = str(EXAMPLES / "data" / "sort_digits" / "heldout.jsonl")
    of_two = seconds(data={"heldout": {"one": file, "other": file}})
    assert 1.5 * seconds() < of_two < sampled


def test_adapters_are_handed_over_in_a_fraction_of_the_time_of_whole_weights_and_by_each_transport() -> None:
    adapters = {"training.lora": {"rank": 8}, "placement.sync_content": "adapter"}
    assert sync_s(times(**adapters)) < 0.7 * sync_s(times(**{"training.lora": {"rank": 8}}))
    files = sync_s(times(**adapters, **{"placement.transport": "disk"}))
    assert files > sync_s(times(**adapters))
    # Measured: 28 layers in 36.6 and 38.3 ms, the first time with the channel (a busy machine of two cores).
    assert 0.030 < sync_s(times(**adapters)) < 0.045
