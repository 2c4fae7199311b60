"""An engine alone: what estimate and simulate say of a job whose framework serves, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlplan
from rlplan.errors import NoFeasiblePlanError, SpecError
from rlplan.planner.serving import ServingJob, serve, serve_load
from rlplan.results import ServingResult
from rlplan.spec.files.job_file import job_from
from rlplan.spec.job import JobSpec
from rlplan.spec.models.catalogue import load_catalogue


def job_data(**changes: Any) -> dict[str, Any]:
    work = {"max_prompt_len": 1024, "max_response_len": 512, "num_concurrent_requests": 32}
    spec = {"policy": "Qwen/Qwen3-32B", "framework": "vllm@0.12", "hardware": "4xH100", "workload": work}
    rollout = {"tp": 4, "gpu_memory_utilization": 0.9} | changes.pop("rollout", {})
    return spec | {"rollout": rollout} | changes


def make_serving(**changes: Any) -> JobSpec:
    return job_from(job_data(**changes))


def test_estimate_and_simulate_answer_for_the_engine() -> None:
    estimated, simulated = rlplan.estimate(job_data()), rlplan.simulate(job_data())
    assert isinstance(estimated, ServingResult)
    assert isinstance(simulated, ServingResult)
    assert estimated.served == simulated.served
    assert rlplan.simulate(estimated) == simulated
    assert estimated.fits
    assert estimated.load is None
    assert simulated.load is not None
    load = simulated.as_json()["load"]
    assert load["tokens_per_s"] == pytest.approx(simulated.load.tokens_per_s)
    assert load["first_token_error"]["kind"] == "serving_ttft", "each latency has its interval"
    assert load["token_error"]["is_known"]


def test_clients_are_shared_out_over_the_engines() -> None:
    single, pair = serve_load(make_serving()), serve_load(make_serving(hardware="8xH100"))
    assert (single.num_engines, pair.num_engines) == (1, 2)
    assert pair.latency.token_s < single.latency.token_s
    assert single.tokens_per_s < pair.tokens_per_s < 2 * single.tokens_per_s


def test_a_checkpoint_is_counted_as_it_is_stored_and_a_format_is_asked_for_otherwise() -> None:
    shape = {"path": "Qwen/Qwen3-32B-FP8", "config": load_catalogue()["Qwen/Qwen3-32B"].config}
    stored, asked = ServingJob(make_serving(policy=shape)), ServingJob(make_serving(rollout={"quantization": "fp8"}))
    assert stored.quantization is not None
    assert stored.quantization.form.name == "fp8-block"
    assert asked.quantization is not None
    assert asked.quantization.form.name == "fp8"
    assert ServingJob(make_serving()).quantization is None


def test_the_release_decides_what_sampling_holds_wherever_it_is_named() -> None:
    """Before 0.17 the profile run samples with PyTorch's full sort of the vocabulary."""
    old, new = serve(make_serving(framework="vllm@0.12")), serve(make_serving(framework="vllm"))
    assert new.memory.sampler_peak < old.memory.sampler_peak
    assert serve(make_serving(framework="vllm", rollout={"engine_version": "0.12.0"})).memory == old.memory


def test_stages_hold_a_part_of_the_weights_and_have_no_seconds() -> None:
    whole, staged = serve(make_serving()), serve(make_serving(hardware="8xH100", rollout={"pp": 2}))
    assert staged.memory.weights < 0.6 * whole.memory.weights
    assert staged.num_gpus == 8
    with pytest.raises(SpecError, match=r"rollout\.pp is 2"):
        serve_load(make_serving(hardware="8xH100", rollout={"pp": 2}))


@pytest.mark.parametrize("key", ["rollout.pp=2", "rollout.cp=2", "workload.num_concurrent_requests=8"])
def test_keys_of_an_engine_alone_are_refused_where_there_is_a_step(key: str) -> None:
    job = job_data() | {"workload": {}, "framework": "rlplan"}
    with pytest.raises(SpecError, match=key.split("=")[0]):
        rlplan.plan(job, [key])


def test_what_needs_a_step_or_a_load_says_so() -> None:
    verbs: tuple[Callable[[dict[str, Any]], object], ...] = (rlplan.plan, rlplan.explain, rlplan.compare)
    for verb in verbs:
        with pytest.raises(SpecError, match="a standalone engine, which has no step"):
            verb(job_data())
    with pytest.raises(SpecError, match="the number of requests in flight is not stated"):
        rlplan.simulate(job_data(workload={}))


def test_a_cache_without_room_for_one_request_is_refused() -> None:
    job = make_serving(policy="meta-llama/Llama-3.1-70B", hardware="1xH100", rollout={"tp": 1})
    assert "weights take" in serve(job).short or "per GPU" in serve(job).short
    with pytest.raises(NoFeasiblePlanError, match="of one request"):
        serve_load(job)


def test_a_job_file_that_holds_its_policy_s_config_needs_no_model_on_disk(tmp_path: Path) -> None:
    policy = {"path": "some/new-model", "config": load_catalogue()["Qwen/Qwen3-32B"].config}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job_data(policy=policy)))
    by_file, by_id = rlplan.estimate(path), rlplan.estimate(job_data())
    assert isinstance(by_file, ServingResult)
    assert isinstance(by_id, ServingResult)
    assert by_file.served.memory == by_id.served.memory


def test_memory_outside_of_torch_that_a_log_states_is_taken_from_the_cache() -> None:
    predicted, stated = (serve(make_serving(rollout=rollout)).memory for rollout in ({}, {"non_torch_memory": "1GiB"}))
    assert predicted.kv_budget - stated.kv_budget == 2**30 - predicted.non_torch


def test_an_older_release_is_slower() -> None:
    older, newer = (serve_load(make_serving(framework=f"vllm@{release}")) for release in ("0.12", "0.19"))
    assert older.latency.token_s > newer.latency.token_s + 1e-3
