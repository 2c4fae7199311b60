"""The `workload:` part of a job: keys for lengths that are set together."""

import pytest

from rlplan.spec.parts.workload import WorkloadSpec


def test_a_mean_length_alone_is_every_response_s_and_a_distribution_says_it_instead() -> None:
    settings = {"max_response_len": 16_384, "mean_response_len": 3000}
    assert WorkloadSpec.model_validate(settings).lengths.mean == 3000
    words = WorkloadSpec.model_validate(settings).tokens_in_words
    assert words == "1,024 + up to 16,384 tokens (constant lengths, 3,000 on average)"
    drawn = WorkloadSpec.model_validate(settings | {"response_lengths": {"kind": "uniform", "low": 100, "high": 2100}})
    assert drawn.lengths.mean == pytest.approx(1100, rel=0.01)
    assert WorkloadSpec(max_response_len=2048).tokens_in_words == "1,024 + 2,048 tokens (constant lengths)"
