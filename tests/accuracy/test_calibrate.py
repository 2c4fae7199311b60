"""Constants fitted to measurements of one's own: what is fitted, what is held out, what is refused."""

from collections.abc import Sequence

import pytest

from rlplan.accuracy.calibrate import CONTEXT, SERVING, TRAINING, Calibration, Sample, calibrate, make_samples
from rlplan.accuracy.files.reading import bundled_points
from rlplan.errors import SpecError
from rlplan.spec.hardware.catalogue import get_gpu
from rlplan.vocabulary import Provenance

H100 = get_gpu("h100", where="")


def steps(ratios: Sequence[float], group: str = TRAINING, *, model: str = "m", gpu: str = "h100-sxm") -> list[Sample]:
    return [Sample(f"{model}{number}", group, gpu, model, ratio, 1.0) for number, ratio in enumerate(ratios)]


def calibrate_samples(samples: Sequence[Sample]) -> Calibration:
    return calibrate(samples, lambda name: get_gpu(name, where=""), {})


def test_steps_that_take_a_quarter_longer_lower_what_training_reaches() -> None:
    calibration = calibrate_samples(steps([1.24, 1.25, 1.25, 1.26, 1.3]))
    assert H100.efficiencies
    assert calibration.profile.efficiencies
    assert calibration.profile.efficiencies.matmul.value == pytest.approx(
        H100.efficiencies.matmul.value / 1.25, abs=1e-4
    )
    assert calibration.profile.efficiencies.matmul.provenance is Provenance.MEASURED
    assert "held-out error" in calibration.profile.efficiencies.matmul.source
    assert calibration.profile.serving == H100.serving, "what was not measured stays"
    assert calibration.profile.name == H100.name


def test_serving_moves_shares_one_way_and_fixed_seconds_the_other() -> None:
    fitted = calibrate_samples(steps([2.0] * 5, SERVING)).profile.serving
    assert fitted
    assert H100.serving
    assert fitted.memory.value == pytest.approx(H100.serving.memory.value / 2)
    assert fitted.layer.value == pytest.approx(H100.serving.layer.value * 2)


def test_bytes_of_a_process_shift_its_context() -> None:
    samples = [Sample(str(number), CONTEXT, "h100-sxm", "m", 10e9 + 2**26, 10e9) for number in range(5)]
    assert calibrate_samples(samples).profile.overheads.context.value == H100.overheads.context.value + 2**26


def test_a_share_never_passes_its_peak() -> None:
    fitted = calibrate_samples(steps([0.3] * 5)).profile.efficiencies
    assert fitted
    assert fitted.matmul.value == 1.0


def test_two_points_are_refused_with_how_many_are_missing() -> None:
    with pytest.raises(SpecError) as refused:
        calibrate_samples(steps([1.2, 1.3]))
    assert "2 of training" in refused.value.what
    assert "3 more" in str(refused.value.way_out)


def test_two_kinds_of_gpus_are_refused_and_both_named() -> None:
    with pytest.raises(SpecError, match=r"h100-sxm \(5\), a100-sxm-80gb \(2\)"):
        calibrate_samples([*steps([1.2] * 5), *steps([1.2] * 2, gpu="a100-sxm-80gb")])


def test_a_fit_that_says_less_of_other_models_is_not_used() -> None:
    samples = [*steps([0.8] * 3, model="a"), *steps([1.25] * 3, model="b")]
    with pytest.raises(SpecError, match="held-out samples"):
        calibrate_samples(samples)


def test_the_held_out_error_is_of_models_that_the_value_has_not_seen() -> None:
    fitted = calibrate_samples([*steps([1.2] * 3, model="a"), *steps([1.3] * 3, model="b")]).fits[0]
    assert fitted.models == ("a", "b")
    assert fitted.error_after == pytest.approx((1.3 / 1.2 - 1 + 1 - 1.2 / 1.3) / 2)


def test_published_points_are_samples_of_seconds_or_bytes_and_others_are_counted() -> None:
    chosen = [
        point for point in bundled_points() if point.id.startswith(("titan-t", "agilerl-smollm2", "foundry-7b-h"))
    ]
    samples, unused = make_samples([*chosen, *(point for point in bundled_points() if point.kind == "param_count")])
    assert {sample.group for sample in samples} == {TRAINING, CONTEXT}
    assert any("param_count" in why for why in unused)
