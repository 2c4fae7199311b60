"""Published weight syncs: what each point's words mean, and the factor that the prediction keeps to."""

import pytest

from rlplan.accuracy.compare import predict
from rlplan.accuracy.files.reading import bundled_points
from rlplan.accuracy.points import MeasuredPoint
from rlplan.accuracy.registry import Prediction, Refusal
from rlplan.accuracy.rl_steps.weight_sync import _setup
from rlplan.timing.transfer.weight_sync import Loader

POINTS = {point.id: point for point in bundled_points() if point.kind == "weight_sync_time"}


def seconds(point: MeasuredPoint) -> float:
    answer = predict(point)
    assert isinstance(answer, Prediction), answer
    assert isinstance(answer.value, float)
    return answer.value


def made(**changes: object) -> MeasuredPoint:
    base = {"id": "a", "kind": "weight_sync_time", "model": "Qwen/Qwen2.5-7B", "gpu": "8+8 H100"}
    return MeasuredPoint.model_validate(base | {"measured": {"value": 1.0, "unit": "s"}} | changes)


def test_at_least_four_in_five_are_within_a_factor_of_two():
    near = [p for p in POINTS.values() if p.measured.bounds and 0.5 <= seconds(p) / p.measured.bounds[0] <= 2]
    assert len(near) >= 0.8 * len(POINTS) == pytest.approx(4.8)


@pytest.mark.parametrize("name", [name for name, point in POINTS.items() if "delta_sharded_s" in point.settings])
def test_the_same_settings_with_a_sparse_transport_are_met_too(name: str):
    point = POINTS[name]
    low, high = point.settings["delta_sharded_s"]
    delta = point.model_copy(update={"settings": point.settings | {"backend": "delta_sharded"}})
    assert low / 2 <= seconds(delta) <= high * 2


def test_gpus_are_read_from_nodes_sums_and_products():
    works = {name: _setup(point) for name, point in POINTS.items()}
    assert (works["verl-wsync-nccl-235b"].num_training, works["verl-wsync-nccl-235b"].num_generation) == (64, 16)
    assert works["verl-wsync-nccl-235b"].tp == 16
    assert (works["verl-ckpteng-h20-235b-64"].num_training, works["verl-ckpteng-h20-235b-64"].bucket_bytes) == (64, 0)
    assert (works["verl-ckpteng-nccl-30b"].num_training, works["verl-ckpteng-nccl-30b"].num_generation) == (2, 30)
    assert not works["verl-ckpteng-nccl-30b"].loads
    assert works["slime-wsync-355b-bf16"].same_devices


def test_the_software_decides_how_weights_are_taken_in():
    assert _setup(made(settings={"rollout": "SGLang bf16"})).loader is Loader.PICKLED
    assert _setup(made(settings={"rollout": "vLLM"})).loader is Loader.IN_PLACE
    assert _setup(made(settings={"backend": "disk"})).transport == "disk"
    assert _setup(made(gpu="8x H100", settings={"placement": "colocated"})).transport == "cuda_ipc"


def test_a_rate_and_milliseconds_are_units_too():
    second = seconds(made())
    assert seconds(made(measured={"value": 1.0, "unit": "ms"})) == pytest.approx(1000 * second)
    rate = seconds(made(measured={"value": 1.0, "unit": "GB/s"}))
    assert rate == pytest.approx(2 * 7615616512 / 1e9 / second)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measured": {"value": 1.0, "unit": "tokens"}}, "no duration"),
        ({"gpu": "8+8 Quantum"}, "no profile"),
        ({"settings": {"lora_rank": 32}}, "adapters"),
        ({"settings": {"dtype": "purple"}}, "dtype"),
    ],
)
def test_what_is_not_known_is_refused_with_the_reason(changes: dict[str, object], words: str):
    answer = predict(made(**changes))
    assert isinstance(answer, Refusal)
    assert words in answer.reason
