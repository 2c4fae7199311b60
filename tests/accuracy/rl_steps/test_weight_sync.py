"""Published weight syncs: what each point's words mean as a job, and what its plan says."""

import pytest

from rlplan.accuracy.compare import compare_point, predict
from rlplan.accuracy.files.reading import bundled_points, published_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.predictions import Prediction, Refusal
from rlplan.accuracy.rl_steps.weight_sync import sync_job

POINTS = {point.id: point for point in bundled_points() if point.kind == "weight_sync_time"}
TRANSPORT_ALONE = "verl-ckpteng-nccl-30b"
"""A benchmark of a transport, which leaves the engines' own part out: no job does."""


def seconds(point: MeasuredPoint) -> float:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    return float(answer.value)


def make_point(**changes: object) -> MeasuredPoint:
    base = {"id": "a", "kind": "weight_sync_time", "model": "Qwen/Qwen2.5-7B", "gpu": "8+8 H100"}
    return MeasuredPoint.model_validate(base | {"measured": {"value": 1.0, "unit": "s"}} | changes)


@pytest.mark.parametrize("name", [name for name in POINTS if name != TRANSPORT_ALONE])
def test_a_published_sync_is_within_six_percent(name: str) -> None:
    point = POINTS[name]
    low, high = point.measured.bounds or (0.0, 0.0)
    assert 0.94 * low <= seconds(point) <= 1.06 * high


def test_gpus_are_read_from_nodes_sums_and_products() -> None:
    job = sync_job(POINTS["verl-wsync-nccl-235b"])
    assert job["hardware"]["num_devices"] == 64 + 16
    assert (job["placement"]["num_generation_devices"], job["rollout"]["tp"]) == (16, 16)
    alone = sync_job(POINTS["verl-ckpteng-h20-235b-64"])
    assert (alone["hardware"]["num_devices"], alone["placement"]["sync_bucket"]) == (128, 0)
    assert sync_job(POINTS["slime-wsync-355b-bf16"])["placement"]["placement"] == "colocated"


def test_the_software_decides_how_weights_are_taken_in() -> None:
    pickled, placed = (seconds(make_point(settings={"rollout": rollout})) for rollout in ("SGLang bf16", "vLLM"))
    assert pickled > placed
    assert sync_job(make_point(settings={"backend": "disk"}))["placement"]["transport"] == "disk"
    assert sync_job(make_point(gpu="8x H100", settings={"placement": "colocated"}))["placement"] == {
        "placement": "colocated"
    }


def test_a_rate_and_milliseconds_are_units_too() -> None:
    second = seconds(make_point())
    assert seconds(make_point(measured={"value": 1.0, "unit": "ms"})) == pytest.approx(1000 * second)
    rate = seconds(make_point(measured={"value": 1.0, "unit": "GB/s"}))
    assert rate == pytest.approx(2 * 7_615_616_512 / second / 1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measured": {"value": 1.0, "unit": "tokens"}}, "no duration"),
        ({"gpu": "8x Foo9000"}, "no profile"),
        ({"settings": {"lora_rank": 8}}, "adapters"),
        ({"settings": {"no_ipc_load": True}}, "every job's sync includes"),
    ],
)
def test_what_is_not_known_is_refused_with_the_reason(changes: dict[str, object], words: str) -> None:
    answer = predict(make_point(**changes))
    assert isinstance(answer, Refusal)
    assert words in answer.reason


def test_a_source_that_names_no_fabric_between_hosts_has_an_interval_down_to_slow_ethernet() -> None:
    """34.26 s were measured for an 8B model over two hosts, 4.6 s are predicted for adapters that are full."""
    points = {point.id: point for point in published_points()}
    unnamed, named = (compare_point(points[name]) for name in ("verl-wsync-tt-8b-fsdp16", "verl-wsync-nccl-32b"))
    assert unnamed.is_inside
    assert (unnamed.spread > 5, named.spread) == (True, 1.0)


def test_a_sync_is_that_of_the_framework_that_a_source_names() -> None:
    """TRL sends each of 18,867 tensors by itself: 40 s were measured, verl's buckets would take 7 to 20."""
    settings = {"framework": "TRL GRPO", "backend": "nccl"}
    trl = make_point(model="Qwen/Qwen3-30B-A3B", gpu="4+4 H100", settings=settings)
    assert sync_job(trl)["framework"] == "trl"
    assert seconds(trl) == pytest.approx(40, rel=0.25)
    assert seconds(trl) > 1.5 * seconds(make_point(model="Qwen/Qwen3-30B-A3B", gpu="4+4 H100"))
