"""Memory of live trainer ranks against the forecast: states exact, peaks within 15 % and never under."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.memory.machine.machine import COMPILED_MATMUL_BYTES
from rlplan.memory.roles.cpu_trainer import TrainerForecast
from rlplan.vocabulary import PERSISTENT_KINDS, ActionKind, MemoryKind
from tests.runtime.live.live_ranks import exercise
from tests.runtime.live.live_trainer import plan_case

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1152,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SIZES = {
    "workload.mini_batch_size": 8,
    "workload.num_prompts_per_step": 2,
    "workload.max_prompt_len": 32,
    "workload.max_response_len": 96,
    "workload.micro_batch_size_per_gpu": 4,
}
KINDS = {
    f"{dtype}, {'recomputed' if recomputed else 'saved'}": {
        "training.dtype": dtype,
        "training.gradient_checkpointing": recomputed,
    }
    for dtype in ("float32", "bfloat16")
    for recomputed in (False, True)
}
GROUPS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    f"ranks{ranks}-stage{stage}": (
        ranks,
        {name: {"training.zero_stage": stage, **kind} for name, kind in KINDS.items()},
    )
    for ranks in (1, 2)
    for stage in range(4)
}
GROUPS["ulysses"] = (
    2,
    {name: {"training.zero_stage": 2, "training.ulysses": 2, **kind} for name, kind in KINDS.items()},
)
GROUPS["bitsandbytes"] = (
    1,
    {
        f"{name}, {dtype}": {"training.zero_stage": 2, "training.dtype": dtype, **changes}
        for dtype in ("float32", "bfloat16")
        for name, changes in {
            "adapters": {"training.lora": {"rank": 8}},
            "nf4": {"training.lora": {"rank": 8}, "training.lora.base_dtype": "nf4"},
            "8 bits": {"training.optimizer": "adamw_8bit"},
        }.items()
    },
)
"""How many ranks, and cases that are started together: each group takes half a minute, and `-k` picks one."""
MOMENTS = {
    "first/forward_backward": ("first", ActionKind.TRAIN_FORWARD_BACKWARD),
    "first/step": ("first", ActionKind.OPTIMIZER_STEP),
    "steady/forward_backward": ("steady", ActionKind.TRAIN_FORWARD_BACKWARD),
    "steady/step": ("steady", ActionKind.OPTIMIZER_STEP),
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 M parameters, drawn at random."""
    from rlplan.runtime.models.start_checkpoint import write_random_checkpoint

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    write_random_checkpoint(folder, folder / "weights", 0)
    return folder / "weights"


@pytest.fixture(scope="module")
def measurements(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any], dict[str, list[Any]]]:
    """(ranks, cases of a group, what each case gave on each rank)."""
    num_ranks, kinds = GROUPS[request.param]
    cases = {
        name: {"exercise": "memory", "overrides": {"policy.path": str(model_folder), **SIZES, **overrides}}
        for name, overrides in kinds.items()
    }
    return num_ranks, cases, exercise(num_ranks, cases, tmp_path_factory.mktemp("ranks"), is_measured=True)


@pytest.mark.parametrize(
    ("measurements", "name"),
    [(group, name) for group, (_, kinds) in GROUPS.items() for name in kinds],
    indirect=["measurements"],
    scope="module",  # else a group would be measured anew for each name
)
def test_states_are_predicted_exactly_and_peaks_within_fifteen_percent(
    measurements: tuple[int, dict[str, Any], dict[str, list[Any]]], name: str
) -> None:
    num_ranks, cases, answers = measurements
    plan = plan_case(num_ranks, cases[name])
    model, profile, layout = plan.job.load_model(), plan.job.load_profile(), plan.schedule.find_layout("policy_trainer")
    # Of a fresh process; these have trained before, and have compiled their matmuls.
    compiled = COMPILED_MATMUL_BYTES if plan.job.training.dtype.num_bytes == 2 else 0
    slack = profile.process_slack.policy_trainer.value + compiled
    for rank in range(num_ranks):
        forecast = TrainerForecast(plan.job, model, profile, layout, rank)
        for key, (run_phase, kind) in MOMENTS.items():
            action = next(action for action in plan.schedule.step if action.kind is kind)
            live = answers[name][rank][key]
            resident, peak = (call(action, run_phase) for call in (forecast.predict_resident, forecast.predict_peak))  # type: ignore[arg-type]
            for persistent in PERSISTENT_KINDS:
                assert live["components"].get(persistent.value, 0) == resident.get(persistent, 0), (key, persistent)
            predicted = sum(peak.values()) - peak[MemoryKind.PROCESS] - peak.get(MemoryKind.SYNC_STAGING, 0)
            assert live["peak"] <= predicted, (rank, key)
            assert predicted - slack <= 1.15 * live["peak"], (rank, key)
