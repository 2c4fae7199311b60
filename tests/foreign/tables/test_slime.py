"""slime's flags as jobs; facts of the table's commit."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.convert import Imported, convert
from rlplan.foreign.documents import flatten_keys
from rlplan.foreign.source import read_source

SLIME = (
    "python3 train.py --hf-checkpoint Qwen/Qwen3-4B --colocate --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--global-batch-size 256 --rollout-max-response-len 1024 --sglang-mem-fraction-static 0.6 --load /ckpt "
)


def slime(folder: Path, flags: str) -> Imported:
    script = folder / "slime.sh"
    script.write_text(SLIME + flags + "\n")
    return convert(read_source(script, None), "H100", None)


def test_slime_s_flags_of_offloading_are_no_names_of_files(tmp_path: Path) -> None:
    usual, result = flatten_keys(slime(tmp_path, "").data), slime(tmp_path, "--no-offload-train --no-offload-rollout")
    keys = ("placement.placement", "placement.offload", "rollout.sleep_level")
    assert [usual.get(key) for key in keys] == ["colocated", "host", 2]
    assert [flatten_keys(result.data).get(key) for key in keys] == ["hybrid", "none", None]
    assert [entry.key for entry in result.left] == ["load"]


def test_a_part_of_slime_s_optimizer_on_the_cpu_is_counted_on_the_gpu(tmp_path: Path) -> None:
    imported = slime(tmp_path, "--optimizer-cpu-offload --optimizer-offload-fraction 0.1")
    assert flatten_keys(imported.data)["training.offloads_optimizer"] is False
    assert any("part of the optimizer" in note for note in imported.notes)
    assert flatten_keys(slime(tmp_path, "--optimizer-cpu-offload").data)["training.offloads_optimizer"] is True


def test_slime_shares_rows_where_its_flag_is_given(tmp_path: Path) -> None:
    result = [slime(tmp_path, f"--tensor-model-parallel-size 2 {more}").data for more in ("", "--sequence-parallel")]
    assert [data["training"]["sequence_parallel"] for data in result] == [False, True]


def test_a_context_that_slime_bounds_leaves_prompts_what_responses_do_not_take(tmp_path: Path) -> None:
    imported = slime(tmp_path, "--rollout-max-context-len 3072")
    assert imported.data["workload"]["max_prompt_len"] == 2048
    assert not any("does not limit prompts" in note for note in imported.notes)
    as_long_as_responses = slime(tmp_path, "--rollout-max-context-len 1024")
    assert as_long_as_responses.data["workload"]["max_prompt_len"] == 1024


def test_sglang_s_cache_in_fp8_is_one_for_slime(tmp_path: Path) -> None:
    assert flatten_keys(slime(tmp_path, "--sglang-kv-cache-dtype fp8_e4m3").data)["rollout.kv_dtype"] == "fp8"


def test_what_slime_counts_in_parts_is_said_with_its_direction(tmp_path: Path) -> None:
    left = {entry.key: entry.why for entry in slime(tmp_path, "--log-probs-chunk-size 1024 --mtp-num-layers 1").left}
    assert left["log_probs_chunk_size"].endswith("predicted with all logits, which takes more")
    assert left["mtp_num_layers"].endswith("not predicted, so that the run takes more")


def test_trainers_that_take_turns_beside_a_critic_are_said_to_be_counted_together(tmp_path: Path) -> None:
    script = tmp_path / "slime.sh"
    script.write_text(SLIME.replace("--colocate", "--rollout-num-gpus 4") + "--advantage-estimator ppo\n")
    imported = convert(read_source(script, None), "H100", None)
    assert imported.data["placement"]["placement"] == "disaggregated"
    assert any("both are counted on the GPU" in note for note in imported.notes)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("/ckpt/Qwen3-4B-FP8/", "fp8"),
        ("Qwen/Qwen3-4B-FP8", "fp8"),
        ("/ckpt/Qwen3-4B-INT4/", None),
        ("Qwen/Qwen3-4B", None),
        ("/ckpt/DeepSeek-R1", "fp8"),
        ("/ckpt/Kimi-K2-Thinking/", "kimi-k2-thinking"),
        ("/ckpt/Kimi-K2-Thinking-bf16/", None),
        ("/ckpt/DeepSeek-R1-Distill-Qwen-7B", None),
    ],
)
def test_sglang_holds_a_checkpoint_in_fp8_as_it_is(name: str, quantization: str | None, tmp_path: Path) -> None:
    """slime gives `--hf-checkpoint` to SGLang as its `find_model_path`; Megatron loads `--load` in bfloat16."""
    script = tmp_path / "slime.sh"
    script.write_text(SLIME.replace("Qwen/Qwen3-4B", name))
    imported = convert(read_source(script, None), "H100", None)
    data = flatten_keys(imported.data)
    assert data.get("rollout.quantization") == quantization
    assert data["policy.path"].endswith(
        Path(name).name.removesuffix("-FP8").removesuffix("-INT4").removesuffix("-bf16")
    )
    assert any("takes more in the engine" in note for note in imported.notes) is ("INT4" in name)


def test_adapters_which_slime_does_not_have_are_those_of_miles(tmp_path: Path) -> None:
    script = tmp_path / "slime.sh"
    script.write_text(SLIME + "--lora-rank 32 --lora-alpha 32\n")
    imported = convert(read_source(script, None), "H100", None)
    assert (imported.settings.table.title, flatten_keys(imported.data)["training.lora.rank"]) == ("miles", 32)
    with pytest.raises(SpecError, match="slime has no LoRA; miles, which builds on it, has"):
        convert(read_source(script, "slime"), "H100", None)


def test_ranks_of_latent_attention_are_of_the_model_s_shape(tmp_path: Path) -> None:
    left = {entry.key: entry.why for entry in slime(tmp_path, "--q-lora-rank 1536 --kv-lora-rank 512").left}
    assert set(left) == {"load", "q_lora_rank", "kv_lora_rank"}
    assert left["kv_lora_rank"] == "the model's shape, which is read from its config"


def test_a_function_that_generates_is_not_counted(tmp_path: Path) -> None:
    imported = slime(tmp_path, "--custom-generate-function-path agents.generate")
    assert any(words.startswith("custom_generate_function_path=") for words in imported.not_counted)
