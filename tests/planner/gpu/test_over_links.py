"""Plans over a slow link: what travels and how long, staleness for the link, the simulator's word, the rule."""

from typing import Any

import pytest

from rlplan.planner.answers.simulated_plan import simulate_plan
from rlplan.planner.plan import Plan
from rlplan.planner.search import find_best_plan
from rlplan.spec.base import validate
from rlplan.spec.files.job_forms import expand_job
from rlplan.spec.job import JobSpec

WORK = {
    "num_prompts_per_step": 64,
    "num_samples_per_prompt": 8,
    "max_prompt_len": 512,
    "max_response_len": 4096,
    "response_lengths": {"kind": "lognormal", "median": 1200, "sigma": 0.6},
}


def plan(link: str, backend: str = "fsdp2", num_generation: int = 8, **placement: Any) -> Plan:
    job = {
        "policy": "Qwen/Qwen2.5-7B",
        "algorithm": {"name": "grpo", "kl_coef": 0},
        "hardware": f"8xH100 + {num_generation}xH100 over {link}",
        "workload": WORK,
        "training": {
            "backend": backend,
            "gradient_checkpointing": True,
            "offloads_optimizer": False,
            "offloads_parameters": False,
        },
        "rollout": {"tp": 1, "max_num_seqs": 64, "quantization": "none"},
        "placement": {"sync_content": "full", **placement},
    }
    return find_best_plan(validate(JobSpec, expand_job(job), file="job.yaml"), with_others=False)


def sync_s(linked: Plan) -> float:
    return linked.costs["sync_weights"].seconds


def test_without_staleness_a_step_waits_for_bytes_over_bandwidth_and_latency() -> None:
    near, far = plan("590Mb/s"), plan("590Mb/s 10000ms")
    travels = 2 * 7_615_616_512 / 73.75e6
    assert travels < sync_s(near) < travels + 5
    assert sync_s(far) - sync_s(near) == pytest.approx(10, abs=1e-6)


def test_weights_that_travel_beside_a_step_stop_it_for_seconds_but_it_is_no_shorter_than_they() -> None:
    linked = plan("590Mb/s", max_staleness=2)
    assert sync_s(linked) < 5
    assert linked.seconds >= 2 * 7_615_616_512 / 73.75e6
    assert any("generation and training continue" in note for note in linked.notes)


@pytest.mark.parametrize(
    ("link", "staleness", "num_generation"),
    [("590Mb/s", 0, 8), ("590Mb/s", 1, 8), ("2Gb/s 4 places", 2, 8), ("590Mb/s", 2, 4096)],
)
def test_plan_and_simulator_agree_within_ten_percent(link: str, staleness: int, num_generation: int) -> None:
    linked = plan(link, num_generation=num_generation, max_staleness=staleness)
    steps = simulate_plan(linked, num_steps=14, seed=1).step_s[5:]
    assert linked.seconds == pytest.approx(sum(steps) / len(steps), rel=0.10)


def test_staleness_is_the_least_that_the_link_needs() -> None:
    linked = plan("590Mb/s", max_staleness="auto")
    assert linked.asked.placement.max_staleness in (1, 2)
    assert any("placement.max_staleness auto is" in note for note in linked.notes)


def test_the_runtime_refuses_a_link_with_its_reason() -> None:
    assert any(reason.startswith("hardware.link") for reason in plan("590Mb/s", backend="deepspeed").refusals)
