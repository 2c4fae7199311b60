"""vLLM's own commands, judged as an engine alone; and DeepSpeed's own files, as Hugging Face writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlplan.errors import NoFeasiblePlanError
from rlplan.foreign.check import Asked, Checked, check, check_fits, import_job
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source
from rlplan.units import GIB

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def check_command(folder: Path, command: str, hardware: str = "1xA10G") -> Checked:
    (folder / "serve.sh").write_text(command + "\n")
    return check(read_source(folder / "serve.sh", None), Asked(hardware))


@pytest.mark.parametrize(
    "command",
    [
        f"vllm serve {LLAMA} --max-model-len 4096",
        f"docker run --gpus all --ipc=host vllm/vllm-openai:latest --model {LLAMA} --max-model-len 4096",
        f"python -m vllm.entrypoints.openai.api_server --model {LLAMA} --max-model-len 4096",
    ],
)
def test_a_server_is_judged_as_an_engine_alone(command: str, tmp_path: Path) -> None:
    """15.0 GiB of weights in 0.92 of 22.5 GiB, and 0.5 GiB of cache for 4,096 tokens: no training beside it."""
    checked = check_command(tmp_path, command)
    assert checked.fits
    assert checked.plan is None
    assert checked.served is not None
    assert checked.served.needed == 4096 * 2 * 32 * 8 * 128 * 2
    assert "serving" in checked.as_json()


def test_a_server_has_as_many_gpus_as_its_ranks(tmp_path: Path) -> None:
    checked = check_command(tmp_path, f"vllm serve {LLAMA} -tp 2 -dp 2 --max-model-len 4096", "A10G")
    assert checked.served is not None
    assert (checked.served.num_gpus, checked.served.num_given) == (4, 4)


def test_data_parallel_ranks_of_a_mixture_share_its_experts_however_they_are_cut(tmp_path: Path) -> None:
    command = "vllm serve Qwen/Qwen3-30B-A3B -dp 4 --max-model-len 4096"
    cut, whole = (
        check_command(tmp_path, command, "H100"),
        check_command(tmp_path, f"{command} --enable-expert-parallel", "H100"),
    )
    assert cut.served is not None
    assert whole.served is not None
    assert cut.served.memory == whole.served.memory
    assert any("every expert is sharded over all ranks" in note for note in cut.served.notes)


def test_a_server_without_a_length_has_the_model_s_and_one_such_sequence_must_fit(tmp_path: Path) -> None:
    """vLLM 0.32.0, kv_cache_utils.py: 131,072 tokens of Llama 3.1 need 16 GiB, and it refuses to start."""
    checked = check_command(tmp_path, f"vllm serve {LLAMA}")
    assert checked.served is not None
    assert checked.served.needed == 16 * GIB
    assert checked.changes[0].values == {"max_model_len": 32768}
    with pytest.raises(NoFeasiblePlanError, match=r"one sequence of 131,072 tokens needs 16\.0 GiB"):
        check_fits(checked)


def test_a_length_that_vllm_fits_to_the_cache_always_fits(tmp_path: Path) -> None:
    assert check_command(tmp_path, f"vllm serve {LLAMA} --max-model-len auto").fits


def test_weights_that_stay_on_the_host_leave_their_room_to_the_cache(tmp_path: Path) -> None:
    usual = check_command(tmp_path, f"vllm serve {LLAMA} --max-model-len 4096").served
    less = check_command(tmp_path, f"vllm serve {LLAMA} --max-model-len 4096 --cpu-offload-gb 10").served
    assert usual is not None
    assert less is not None
    assert less.memory.kv_cache - usual.memory.kv_cache == pytest.approx(10 * GIB, abs=1 << 23)


def test_drafted_tokens_take_none_of_what_lies_outside_the_engine_s_share(tmp_path: Path) -> None:
    speculative = '{"method": "ngram", "num_speculative_tokens": 4}'
    command = f"vllm serve Qwen/Qwen3-32B -tp 2 --max-model-len 4096 --speculative-config '{speculative}'"
    engine = check_command(tmp_path, command, "2xH100").served
    assert engine is not None
    assert engine.num_bytes <= engine.memory.requested
    assert any("drafted tokens" in note for note in engine.notes)


def test_a_server_that_needs_more_gpus_than_there_are_does_not_fit(tmp_path: Path) -> None:
    checked = check_command(
        tmp_path, f"vllm serve {LLAMA} -tp 2 --pipeline-parallel-size 2 --max-model-len 4096", "2xH100"
    )
    assert checked.served is not None
    assert checked.served.short == "it needs 4 GPUs, 2 available"


def import_deepspeed(folder: Path, config: dict[str, Any]) -> Imported:
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}} | config))
    return convert(read_source(folder / "ds.json", None), "8xH100", "Qwen/Qwen2.5-1.5B")


def test_what_hugging_face_fills_in_is_not_taken_for_a_value(tmp_path: Path) -> None:
    """`"auto"`, also for two numbers, in the files of its pages on DeepSpeed."""
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    config = {"optimizer": {"type": "AdamW", "params": params}, "gradient_accumulation_steps": "auto"}
    values = flatten_keys(import_deepspeed(tmp_path, config).data)
    assert "algorithm.adam_beta1" not in values
    both = flatten_keys(
        import_deepspeed(tmp_path, {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.9]}}}).data
    )
    assert (both["algorithm.adam_beta1"], both["algorithm.adam_beta2"]) == (0.8, 0.9)


def test_half_precision_that_is_filled_in_is_counted_with_a_note(tmp_path: Path) -> None:
    imported = import_deepspeed(tmp_path, {"bf16": {"enabled": "auto"}})
    assert flatten_keys(imported.data)["training.dtype"] == "bfloat16"
    assert any(note.startswith('bf16 "auto"') for note in imported.notes)
    assert flatten_keys(import_deepspeed(tmp_path, {}).data)["training.dtype"] == "float32"


def test_a_large_count_may_be_written_as_a_power_of_ten(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}
    assert flatten_keys(import_deepspeed(tmp_path, config).data)["training.reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize("batch", [24, 64, 4096])
def test_a_batch_of_deepspeed_s_is_one_optimizer_step_of_a_job_whatever_its_size(batch: int, tmp_path: Path) -> None:
    """Its file says the trainer alone: a step of the job around it has whole ones, of passes that DeepSpeed derives."""
    settings = {"train_batch_size": batch, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    _, job = import_job(read_source(tmp_path / "ds.json", None), Asked("8xH100", "Qwen/Qwen2.5-1.5B"))
    assert job.workload.rollouts_per_mini_batch == batch
    assert job.workload.micro_batch_size_per_gpu == batch // 8
