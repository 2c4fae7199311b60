"""A job that its framework refuses has the verdict `refused` with the reason, never `fits`.

The rules stand in planner/rules.py; the search, the verdict, `emit` and the loader of a bundle read them there.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlplan.emit.bundle import read_bundle, write_bundle
from rlplan.errors import EmitError, NoFeasiblePlanError, SpecError
from rlplan.frameworks.profile import find_release
from rlplan.planner import rules
from rlplan.planner.answers.changes import Change, ask
from rlplan.planner.answers.plan_results import estimate_as_json
from rlplan.planner.executable import check_fits, require_executable
from rlplan.planner.plan import Plan
from rlplan.planner.plan_parts import Verdict
from rlplan.planner.search import find_best_plan, find_plan
from rlplan.spec.files.job_file import job_from
from rlplan.spec.job import JobSpec
from tests.factories import EXAMPLES, make_job, write_config
from tests.planner.test_planned_is_executed import ALGORITHMS, DATA, GPUS
from tests.repository.at_night import mark_nightly

SHORT = {"num_prompts_per_step": 32, "num_samples_per_prompt": 8, "max_prompt_len": 512, "max_response_len": 512}
OTHER_TRAINERS = ("megatron", "fsdp2")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"policy": "Qwen/Qwen3-30B-A3B", "hardware": "16xH200"}, "Qwen3MoeForCausalLM"),
    "sliding windows": ({"policy": "google/gemma-2-9b"}, "Gemma2ForCausalLM"),
    "two kinds of GPUs": (
        {"hardware": "8xH100 + 8xL40S", "placement": {"placement": "disaggregated", "num_generation_devices": 8}},
        "one kind of GPUs",
    ),
    "another maker's GPUs": ({"hardware": "8xMI300X"}, "this is rocm"),
    "the disk": ({"training": {"offload_device": "nvme", "offloads_optimizer": True}}, "offload_device nvme"),
    "muon": ({"training": {"optimizer": "muon"}}, "the runtime has AdamW"),
    "master weights in 16 bits": ({"training": {"master_dtype": "bfloat16"}}, "master weights are fp32"),
    "activations on the host": ({"training": {"offloads_activations": True}}, "activations stay on the device"),
    "another loss": ({"training": {"logits": "chunked"}}, "row-chunked loss"),
    "formats of the engine": ({"rollout": {"quantization": "awq"}}, "the engine can only quantize to fp8"),
    "data-parallel attention": (
        {"policy": "Qwen/Qwen3-30B-A3B", "hardware": "16xH200", "rollout": {"attention_dp": 4}},
        "rollout.attention_dp 4",
    ),
    "another engine": ({"rollout": {"engine": "sglang"}}, "the runtime syncs weights into vLLM"),
    "speculative decoding": (
        {"rollout": {"speculative_tokens": 3, "acceptance_rate": 0.5}},
        "tested on CPU hosts only, not on GPUs",
    ),
}


def build_job(parts: dict[str, Any]) -> JobSpec:
    """A job for rlplan's own runtime but for its parts."""
    whole = {
        "framework": "rlplan",
        "policy": "Qwen/Qwen2.5-1.5B",
        "algorithm": "grpo",
        "hardware": "8xH100",
        "workload": SHORT,
        "data": DATA,
    }
    return job_from({**whole, "rewards": [{"kind": "answer_matcher"}], **parts})


@pytest.mark.parametrize(
    ("policy", "hardware", "backend"),
    [
        ("Qwen/Qwen2.5-1.5B", "8xH100", "deepspeed"),
        ("Qwen/Qwen3-30B-A3B", "16xH200", "megatron"),
        ("google/gemma-2-9b", "8xH100", "fsdp2"),
    ],
)
def test_a_job_that_names_no_framework_is_planned_for_one_that_runs_its_policy(
    policy: str, hardware: str, backend: str
) -> None:
    parts = {"policy": policy, "hardware": hardware, "framework": "auto"}
    plan = find_best_plan(build_job(parts), with_others=False)
    assert (plan.job.backend, plan.verdict) == (backend, Verdict.FITS)
    newest_verl = find_release("verl").label
    notes = [note for note in plan.notes if note.startswith(f"framework auto is {newest_verl}: policy.path ")]
    assert bool(notes) is (backend != "deepspeed")
    assert plan.job.framework == ("rlplan" if backend == "deepspeed" else newest_verl)
    if backend != "deepspeed":
        with pytest.raises(
            EmitError, match=r"framework=rlplan\), which refuses policy.path .*tested on CPU hosts only"
        ):
            require_executable(plan)


def test_a_job_that_names_no_framework_is_planned_for_one_that_knows_its_algorithm() -> None:
    parts = {
        "policy": "Qwen/Qwen3-30B-A3B",
        "hardware": "8xH200",
        "framework": "auto",
        "algorithm": "dpo",
        "workload": {},
    }
    plan = find_best_plan(build_job({**parts, "rewards": []}), with_others=False)
    # verl's exports have no DPO
    assert plan.job.framework == find_release("trl").label
    assert plan.verdict is Verdict.FITS


@pytest.mark.parametrize(("parts", "words"), mark_nightly(REFUSED.values(), but=[*REFUSED.values()][::2]), ids=REFUSED)
def test_what_the_runtime_refuses_whatever_is_chosen_is_refused_and_says_why(parts: dict[str, Any], words: str) -> None:
    plan = find_best_plan(build_job(parts))
    assert plan.verdict is Verdict.REFUSED
    assert any(words in reason for reason in plan.refusals)
    stated = estimate_as_json(plan)
    assert (stated["verdict"], stated["refusals"]) == ("refused", list(plan.refusals))
    assert not plan.remedies, "no bytes help"
    for refuse in (check_fits, require_executable):
        with pytest.raises(EmitError, match="refused: ") as caught:
            refuse(plan)
        assert caught.value.exit_code == 3
    with pytest.raises(EmitError, match="refused: "):
        find_plan(plan.asked)


@pytest.mark.parametrize("backend", OTHER_TRAINERS)
def test_a_framework_that_has_it_does_not_refuse_it(backend: str) -> None:
    plan = find_best_plan(build_job({**REFUSED["experts"][0], "framework": "verl", "training": {"backend": backend}}))
    assert plan.verdict is plan.fit
    assert not plan.refusals


def test_a_base_in_4_bits_is_counted_for_verl_and_refused() -> None:
    training = {"backend": "fsdp2", "lora": {"rank": 8, "base_dtype": "nf4"}}
    plan = find_best_plan(build_job({"framework": "verl", "training": training}))
    assert plan.verdict is Verdict.REFUSED
    assert "training.lora.base_dtype nf4: an export for verl has auto" in plan.refusals[0]


def test_a_framework_that_lacks_it_refuses_it_too() -> None:
    plan = find_best_plan(build_job({**REFUSED["two kinds of GPUs"][0], "framework": "verl"}))
    assert plan.verdict is Verdict.REFUSED
    assert any("no key tells two kinds of GPUs apart" in reason for reason in plan.refusals)


def test_another_trainer_of_the_framework_is_a_remedy() -> None:
    one_gpu = {"policy": "meta-llama/Llama-2-7b-hf", "hardware": "1xA100-80GB", "framework": "trl"}
    assert "training.backend=deepspeed" in [remedy.change for remedy in find_best_plan(build_job(one_gpu)).remedies]


def test_a_change_that_leads_to_a_refusal_says_so_and_is_no_remedy() -> None:
    outcome = ask(build_job({}), Change(("training.optimizer=muon",)), finds_way_out=True)
    assert outcome.verdict is Verdict.REFUSED
    assert not outcome.fits
    assert "the runtime has AdamW" in outcome.why


def test_a_cpu_host_refuses_with_the_same_error() -> None:
    job = make_job(**{"rollout.kv_dtype": "fp8"})
    (reason,) = rules.find_job_refusals(job)
    with pytest.raises(EmitError, match="the engine has it on GPUs only") as caught:
        find_plan(job)
    assert reason in caught.value.what


def test_a_config_without_weights_is_estimated_and_emit_says_what_is_missing(tmp_path: Path) -> None:
    plan = find_best_plan(build_job({"policy": str(EXAMPLES / "models" / "decoder-160m" / "config.json")}))
    assert plan.verdict is Verdict.FITS
    with pytest.raises(SpecError, match=r"policy\.path is a config alone"):
        write_bundle(require_executable(plan), tmp_path)


DENSE = (
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "mistralai/Mistral-7B-v0.3",
)
OTHERS = ("Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "openai/gpt-oss-20b")
"""Families that the runtime does not train."""


def any_job(seed: int) -> JobSpec:
    """A job on GPUs with random choices, some of which the runtime refuses. Raises: SpecError where two contradict."""
    random = Random(seed)

    def one(*usual: Any, seldom: tuple[Any, ...] = ()) -> Any:
        return random.choice(seldom if seldom and random.random() < 0.05 else usual)

    algorithm, prompts = one(*ALGORITHMS, seldom=("dpo",)), one(32, 64, 128)
    samples = 2 if algorithm == "dpo" else one(4, 8)
    where = "auto" if algorithm == "dpo" else one("auto", "auto", "colocated", "hybrid", "disaggregated")
    optimizer = one("adamw", "adamw", "adamw_8bit", seldom=("muon",))
    training = {
        "zero_stage": one("auto", "auto", 1, 2, 3),
        "optimizer": optimizer,
        "lora": one(None, None, {"rank": 32}, {"rank": 16, "base_dtype": "nf4"}),
        "ulysses": one("auto", "auto", 1, 2),
        "offload_device": one("cpu", seldom=("nvme",)),
        "master_dtype": one("float32", seldom=("bfloat16",)),
    }
    if training["zero_stage"] == 3 and optimizer == "adamw":
        training["offloads_optimizer"] = one("auto", True, False)
    rollout = {
        "tp": one("auto", "auto", 1, 2),
        "quantization": one("none", "auto", "fp8", seldom=("awq",)),
        "sleep_level": one(1, 2) if where == "colocated" else "auto",
    }
    placement = {
        "placement": where,
        "max_staleness": one(0, 1) if where == "disaggregated" else 0,
        "transport": one("auto", "auto", "disk"),
        "offload": one("auto", "none", "host"),
    }
    sizes = {
        "num_prompts_per_step": prompts,
        "num_samples_per_prompt": samples,
        "mini_batch_size": one(None, prompts * samples // 2, prompts * samples // 4),
    }
    backend = one("deepspeed", seldom=OTHER_TRAINERS)
    return job_from(
        {
            "policy": one(*DENSE, seldom=OTHERS),
            "algorithm": algorithm,
            "hardware": one(*GPUS, seldom=("8xH100 + 8xL40S", "8xMI300X")),
            "workload": {**SHORT, **sizes, "max_response_len": one(1024, 3072)},
            "training": training if backend == "deepspeed" else {"backend": backend},
            "rollout": rollout,
            "placement": placement,
            "checkpoints": {"every": one(0, 1, 20)},
            "data": DATA,
            "rewards": [{"kind": "answer_matcher"}],
        }
    )


def check(seed: int, folder: Path) -> Verdict | None:
    """The verdict on a random job, which says the truth; None where two of its choices contradict each other."""
    try:
        plan = find_best_plan(any_job(seed))
    except (SpecError, NoFeasiblePlanError):
        return None
    if plan.verdict is Verdict.REFUSED:
        _check_refused(plan)
    elif plan.job.backend == "deepspeed" and plan.verdict is not Verdict.DOES_NOT_FIT:
        plan = require_executable(plan)
        write_bundle(plan, folder)
        assert read_bundle(folder).schedule == plan.schedule
    return plan.verdict


def _check_refused(plan: Plan) -> None:
    with pytest.raises(EmitError, match="refused: "):
        require_executable(plan)


@pytest.mark.parametrize("seeds", mark_nightly((range(4), range(4, 40)), but=1))
def test_of_random_jobs_each_that_fits_is_taken_and_no_other(seeds: range, tmp_path: Path) -> None:
    verdicts = [check(seed, tmp_path / str(seed)) for seed in seeds]
    assert Verdict.FITS in verdicts


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 600, 50))
def test_of_many_random_jobs_each_that_fits_is_taken_and_no_other(first: int, tmp_path: Path) -> None:
    verdicts = [check(seed, tmp_path / str(seed)) for seed in range(first, first + 50)]
    assert {Verdict.FITS, Verdict.REFUSED} <= set(verdicts)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"head_dim": 16}, "head size 16: vLLM's CPU attention supports head sizes 32, 64"),
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "head_dim": 32,
                "hidden_size": 80,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": None,
            },
            "experts with hidden size 80",
        ),
    ],
)
def test_a_shape_that_no_kernel_of_the_engine_takes_is_known_before_anything_starts(
    tmp_path: Path, overrides: dict[str, Any], reason: str
) -> None:
    job = make_job(**{"policy.path": str(write_config(tmp_path, **overrides))})
    assert [refusal for refusal in rules.find_job_refusals(job) if reason in refusal]
