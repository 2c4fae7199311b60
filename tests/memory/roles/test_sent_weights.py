"""Copies of what was sent last, on the hosts: whose they are, from when on, and how large, worked by hand."""

from dataclasses import replace

import pytest

from rlplan.dataflow.choice import Choice
from rlplan.dataflow.schedule import Action
from rlplan.memory.predict import Forecast
from rlplan.memory.roles.trainer import KeepsSentWeights, TrainerOnGpu, sent_weights_bytes
from rlplan.planner.gpu.search import GpuSearch
from rlplan.planner.plan import Plan
from rlplan.planner.setting import read_setting
from rlplan.spec.models.catalogue import find_model
from rlplan.vocabulary import ActionKind, MemoryKind, Phase, Role, Stream
from tests.factories import gpu_job

POLICY = "Qwen/Qwen2.5-0.5B"
P = find_model(POLICY).num_parameters
TABLE = 151_936 * 896
COPY = 2 * P + 2 * TABLE
"""Bytes of the copy in bf16, where every tensor fills cache lines, and of the largest packet, a vocabulary table."""


def build_search(backend: str = "deepspeed", gpus: str = "16xH100", policy: str = POLICY, *more: str) -> GpuSearch:
    asked = ("placement.placement=disaggregated", "rollout.tp=1", "placement.sync_content=delta", *more)
    job = gpu_job({"policy": policy, "hardware": gpus, "algorithm": "ppo", "training": {"backend": backend}}, asked)
    return GpuSearch(job, read_setting(job))


def find_forecast(search: GpuSearch, process: str) -> Forecast:
    arrangement = next(candidate for candidate in search.space.arrangements if candidate.num_training == 8)
    trainer, engine = search.space.list_sweeps(arrangement)[0].choices[0], search.space.list_engines(arrangement)[0]
    return search.roles.forecast_process(process, Choice(arrangement, trainer, engine, "delta"), 100.0)


def action(kind: ActionKind) -> Action:
    return Action(kind.value, kind, Role.POLICY, Phase.SYNC, "shared", Stream.TRANSFER, ())


def copies(forecast: Forecast, kind: ActionKind) -> tuple[int, int]:
    """Bytes of the copy on every rank, and on the first rank alone."""
    both = forecast.predict_host(action(kind), "steady"), forecast.predict_first_host(action(kind), "steady")
    each, first = (sizes.get(MemoryKind.SYNC_STAGING, 0) for sizes in both)
    return each, first


def test_every_rank_of_an_engine_has_a_copy_of_the_whole_policy_from_the_first_sync_on() -> None:
    forecast = find_forecast(build_search(), "rollout_engine/0")
    assert copies(forecast, ActionKind.START_ENGINE) == (0, 0)
    assert copies(forecast, ActionKind.SYNC_WEIGHTS) == copies(forecast, ActionKind.GENERATE) == (COPY, 0)
    assert isinstance(forecast, KeepsSentWeights)
    for kind in (ActionKind.SYNC_WEIGHTS, ActionKind.GENERATE):
        on_gpu = forecast.rank.predict_peak(action(kind), "steady")
        assert forecast.predict_peak(action(kind), "steady") == on_gpu, "none of it on the GPU"


def test_of_the_trainer_s_ranks_the_one_that_sends_has_it_and_of_other_roles_none() -> None:
    search = build_search()
    assert copies(find_forecast(search, "policy_trainer/0"), ActionKind.SYNC_WEIGHTS) == (0, COPY)
    assert copies(find_forecast(search, "policy_trainer/0"), ActionKind.OPTIMIZER_STEP) == (0, COPY)
    assert copies(find_forecast(search, "value_trainer/0"), ActionKind.SYNC_WEIGHTS) == (0, 0)


def test_wider_elements_take_twice_as_much() -> None:
    assert (
        sent_weights_bytes(find_model(POLICY), 4, 1 << 29)
        == 2 * COPY
        == 2 * sent_weights_bytes(find_model(POLICY), 2, 1 << 29)
    )


def test_under_fsdp2_each_rank_pins_its_own_part_and_engines_keep_nothing() -> None:
    search = build_search("fsdp2")
    assert copies(find_forecast(search, "rollout_engine/0"), ActionKind.SYNC_WEIGHTS) == (0, 0)
    each, first = copies(find_forecast(search, "policy_trainer/0"), ActionKind.SYNC_WEIGHTS)
    # An eighth, each tensor's part in a power of two of bytes. Table: 34,033,664 -> 2^26. Of a layer: gate, up, down
    # 4,864 x 896 each: 1,089,536 -> 2^21; query, output 896 x 896: 200,704 -> 2^18; key, value 128 x 896: 28,672 ->
    # 2^15; norms and the query's bias 896: 224 -> 256, key's and value's 128: 32.
    layer = 3 * 2**21 + 2 * 2**18 + 2 * 2**15 + 3 * 256 + 2 * 32
    assert (each, first) == (2**26 + 24 * layer + 256, 0)


def test_a_rank_of_megatron_keeps_as_much_as_it_has_of_the_weights() -> None:
    search = build_search("megatron", "16xH100", POLICY, "training.tp=1", "training.pp=1")
    forecast = find_forecast(search, "policy_trainer/0")
    assert isinstance(forecast, KeepsSentWeights)
    assert isinstance(forecast.rank, TrainerOnGpu)
    size = forecast.rank.ranks[0].fixed.share_bytes
    assert copies(forecast, ActionKind.SYNC_WEIGHTS)[0] == size == pytest.approx(2 * P, rel=0.01)


def test_eight_engine_ranks_of_70b_need_more_than_a_terabyte_of_their_host() -> None:
    search = build_search("deepspeed", "24xH100", "meta-llama/Llama-3.1-70B", "rollout.tp=8")
    arrangement = next(a for a in search.space.arrangements if a.num_training == 16 and a.offloaded == "none")
    trainer, engine = search.space.list_sweeps(arrangement)[-1].choices[-1], search.space.list_engines(arrangement)[0]
    choice = Choice(arrangement, trainer, engine, "delta")
    changes, whole = (search.build_plan(search.score(replace(choice, sync_mode=mode))) for mode in ("delta", "nccl"))
    copy = sent_weights_bytes(find_model("meta-llama/Llama-3.1-70B"), 2, 1 << 29)
    assert 8 * copy > 1.1e12
    assert host_bytes(changes, "host:1") - host_bytes(whole, "host:1") == 8 * copy
    steady = [moment for moment in changes.ledger.order if moment[0] == "steady"]
    totals = [plan.ledger.host_totals("host:0") for plan in (changes, whole)]
    assert {totals[0][at] - totals[1][at] for at in steady} == {copy}, "of eight training ranks of a host one sends"
    assert search.roles.predict_fit(choice).host == max(
        changes.ledger.host_peak(host).num_bytes for host in ("host:0", "host:1")
    )


def host_bytes(plan: Plan, host: str) -> int:
    return plan.ledger.host_peak(host).num_bytes
