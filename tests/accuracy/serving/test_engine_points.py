"""Start-up logs of vLLM by version: what is left for the KV cache."""

import pytest

from rlplan.accuracy.compare import compare_point, load_predictors
from rlplan.accuracy.points import MeasuredPoint


def test_a_published_cache_of_vllm_0_11_is_met_with_the_full_sort_and_not_without_it() -> None:
    """Published: vLLM issue 27508, `Available KV cache memory: 1.71 GiB` of gpt-oss-120b; without the sort 6.54."""
    load_predictors()
    point = MeasuredPoint(
        id="v27508",
        kind="vllm_kv",
        model="openai/gpt-oss-120b",
        gpu="H100",
        settings={
            "tp": 1,
            "vllm": "0.11.0 V1",
            "gpu_memory_utilization": 0.95,
            "max_num_batched_tokens": 1024,
            "max_model_len": 131072,
        },
        measured={"value": 1.71, "unit": "GiB/GPU"},  # type: ignore[arg-type]
    )
    later = point.model_copy(update={"settings": point.settings | {"vllm": "0.17.0 V1"}})
    assert abs(compare_point(point).relative_error or 9.0) <= 0.25
    assert compare_point(later).predicted == pytest.approx(6.54, abs=0.1)
