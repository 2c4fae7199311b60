"""`rlplan estimate` for GPUs: from a command line, from a file, as text and as JSON."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.factories import EXAMPLES

ASKED = ("estimate", "--model", "Qwen/Qwen2.5-7B", "--algorithm", "grpo", "--gpus", "8xH100")


MODEL = ("--model", "Qwen/Qwen2.5-7B")
HALF = ("training.dtype=float16", "rollout.dtype=float16")


def test_a_budget_is_a_page_that_says_what_binds(rlplan: Call) -> None:
    answer = rlplan(*ASKED, "-v")
    assert (answer.exit_code, answer.err) == (0, "")
    for words in (
        "fits  Qwen/Qwen2.5-7B, grpo, 8x h100-sxm:",
        "Memory in one step, one GPU (all 8 alike)",
        " < ",
        "At the peak: ",
        "kv_cache_memory_bytes=",
        "Host: ",
        "hybrid: ",
    ):
        assert words in answer.out


def test_json_has_every_row_with_interval_source_and_provenance(rlplan: Call) -> None:
    data = json.loads(rlplan(*ASKED, "--json").out)
    assert data["schema_version"] == 4
    assert data["verdict"] == "fits"
    assert data["peak_bytes"]["low"] <= data["peak_bytes"]["expected"] <= data["peak_bytes"]["high"]
    assert data["kv_cache"]["kv_cache_memory_bytes"] % 917_504 == 0  # whole blocks: 28 layers * 16 * 2 * 4 * 128 * 2
    devices = [row for row in data["rows"] if row["space"] == "device"]
    assert {row["phase"] for row in devices} >= {"start", "rollout", "score", "train", "sync", "switch"}
    for row in devices:
        assert row["low_bytes"] <= row["peak_bytes"] <= row["high_bytes"]
        assert row["source"]
        assert row["provenance"]


def test_overrides_stand_beside_the_options(rlplan: Call) -> None:
    short = json.loads(
        rlplan(*ASKED, "workload.max_response_len=1024", "training.gradient_checkpointing=true", "--json").out
    )
    assert short["job"]["workload"]["max_response_len"] == 1024
    assert short["chosen"]["training.gradient_checkpointing"] == "true"


def test_a_file_asks_the_same(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("policy: Qwen/Qwen2.5-7B\nalgorithm: grpo\nhardware: 8xH100\n")
    assert rlplan("estimate", path).out == rlplan(*ASKED).out.partition("Assumed: ")[0]
    assert json.loads(rlplan("estimate", path, "hardware=4xH200", "--json").out)["devices"] == "4x h200-sxm"


def test_options_lie_over_a_file(rlplan: Call) -> None:
    path = "examples/grpo-7b-8xh100.yaml"
    answer = json.loads(rlplan("estimate", path, "--algorithm", "ppo", "--gpus", "8xH200", "--json").out)
    assert (answer["job"]["algorithm"]["name"], answer["devices"]) == ("ppo", "8x h200-sxm")


@pytest.mark.parametrize("content", ["5", "hardware", "", "[hardware]"])
def test_a_file_that_is_no_mapping_is_one_message(rlplan: Call, tmp_path: Path, content: str) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(content)
    answer = rlplan("estimate", path)
    assert (answer.exit_code, answer.out) == (2, "")
    assert len(answer.err.splitlines()) == 4


def test_a_single_gpu_that_is_too_small_still_gets_its_page(rlplan: Call) -> None:
    answer = rlplan("estimate", *MODEL, "--gpus", "1xRTX4090")
    assert answer.exit_code == 1
    assert "does not fit" in answer.out
    assert "Each of these changes alone helps" in answer.out


def test_quantised_bases_need_less(rlplan: Call) -> None:
    fixed = ("--gpus", "8xH100", "training.zero_stage=2", "placement.placement=hybrid", "--json")

    def weights(base: str) -> int:
        answer = json.loads(rlplan("estimate", *MODEL, *fixed, f"training.lora={{rank: 16, base_dtype: {base}}}").out)
        held_bytes = [
            row for row in answer["rows"] if row["process"] == "policy_trainer/0" and row["kind"] == "weights"
        ]
        return max(row["resident_bytes"] for row in held_bytes)

    assert weights("nf4") < 0.5 * weights("auto")


def test_what_does_not_fit_ends_with_1_and_says_what_would(rlplan: Call) -> None:
    asked = ("estimate", "--model", "Qwen/Qwen2.5-32B", "--gpus", "16xH100")
    asked = (*asked, "placement.placement=colocated")
    answer = rlplan(*asked, "training.zero_stage=2", "placement.offload=none")
    assert answer.exit_code == 1
    assert "does not fit" in answer.out
    assert "Each of these changes alone helps" in answer.out
    assert "error: Qwen/Qwen2.5-32B needs" in answer.err
    assert "training.zero_stage=3" in answer.err.partition("way out: ")[2]
    assert rlplan(*asked, "training.zero_stage=3", "placement.offload=none").exit_code == 0


def test_a_host_that_is_too_small_is_said_to_be(rlplan: Call) -> None:
    fixed = ("training.zero_stage=3", "training.offloads_optimizer=true", "training.offloads_parameters=true")
    host = ("placement.placement=colocated", "hardware.host_memory=64GiB", "hardware.num_hosts=1")
    answer = rlplan("estimate", *MODEL, "--gpus", "2xA100", *fixed, *host)
    assert answer.exit_code == 1
    assert "of a host's memory, 64.0 GiB available" in answer.err
    assert "a host's memory: " in answer.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "8xH100"), "which model?"),
        (("--model", "Qwen/Qwen2.5-7B"), "on which GPUs?"),
        (("--model", "Qwen2.5", "--gpus", "8xH100"), "--model Qwen/Qwen2.5-"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH1000"), "h100"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "0xH100"), "from 1"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH100", "--algorithm", "grppo"), "known algorithms"),
        (
            ("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH100", "training.lora={rank: 8, target_modules: [x_proj]}"),
            "x_proj",
        ),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH100", "rollout.quantization=fp9"), "fp9"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "8xH100", "rollout.tp=3"), "3"),
        (("--model", "Qwen/Qwen2.5-7B", "--gpus", "1xH100", "placement.placement=disaggregated"), "at least 2 GPUs"),
        ((*MODEL, "--gpus", "8xB200", "rollout.tp=16"), "num_heads 28 does not divide over tp 16"),
        ((*MODEL, "--gpus", "3xB200", "rollout.tp=4", "placement.placement=hybrid"), "does not divide the 3 GPUs"),
        ((*MODEL, "--gpus", "8xH100", "training.ulysses=8"), "the model has 28 attention heads"),
        ((*MODEL, "--gpus", "8xH100", "workload.max_response_len=200000"), "the model's limit is 131,072"),
        ((*MODEL, "--gpus", "1xT4", "training.dtype=bfloat16"), "bfloat16, which a t4 does not support"),
        ((*MODEL, "--gpus", "1xT4", *HALF, "rollout.kv_dtype=fp8"), "fp8 on a t4"),
        ((*MODEL, "--gpus", "8xH100", "hardware.memory=0"), "memory"),
        ((*MODEL, "--gpus", "8xH100", "hardware.memory=500GiB"), "must not exceed what the driver reports"),
        ((*MODEL, "--gpus", "8xH100", "training.offloads_optimizer=yes"), "training.offloads_optimizer is 'yes'"),
        ((*MODEL, "--gpus", "8xH100", "training.zero_stage=2", "training.offloads_parameters=true"), "only ZeRO-3"),
        (
            (*MODEL, "--gpus", "8xH100", "training.zero_stage=0", "training.offloads_optimizer=true"),
            "ZeRO stage 2 or 3",
        ),
        ((*MODEL, "--gpus", "8xH100", "training.optimizer=muon", "training.offloads_optimizer=true"), "CPU Adam"),
        ((*MODEL, "--gpus", "8xH100", "training.lora={rank: 8, base_dtype: nf4}", "training.zero_stage=3"), "nf4"),
        ((*MODEL, "--gpus", "8xH100", "rollout.sleep_level=1", "placement.placement=hybrid"), "colocated"),
        ((), "nothing to estimate"),
    ],
)
def test_a_wrong_question_is_one_message(rlplan: Call, arguments: tuple[str, ...], words: str) -> None:
    answer = rlplan("estimate", *arguments)
    assert answer.exit_code in (1, 2)
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert words in answer.err
    assert "Traceback" not in answer.err


def test_a_trace_answers_for_any_architecture_that_transformers_builds(rlplan: Call) -> None:
    short = ("workload.max_prompt_len=400", "workload.max_response_len=100")
    asked = ("--model", "examples/models/decoder-160m", "--gpus", "8xH100", *short)
    small = ("--model", "examples/models/sorter", "--gpus", "8xH100", "workload.max_prompt_len=20")
    answer = rlplan("estimate", "--trace", *small, "workload.max_response_len=20")
    assert answer.exit_code == 0, answer.err
    assert "examples/models/sorter on 8x h100-sxm" in answer.out
    traced = json.loads(rlplan("estimate", "--trace", *asked, "--json").out)
    known = json.loads(rlplan("estimate", *asked, "training.zero_stage=3", "--json").out)
    assert traced["num_bytes"] == sum(traced["rows"].values())
    states = ("weights", "master_weights", "optimizer", "gradients")
    held_bytes = {
        row["kind"]: row["peak_bytes"]
        for row in known["rows"]
        if (row["process"], row["action_id"], row["run_phase"]) == ("policy_trainer/0", "optimizer_step", "steady")
    }
    for kind in states:
        assert traced["rows"][kind] == pytest.approx(held_bytes[kind], rel=0.02)


@pytest.mark.nightly
def test_traces_of_several_stages_are_one_answer(tmp_path: Path, rlplan: Call) -> None:
    sft = {"name": "sft", "algorithm": "sft"}
    job = {"schema_version": 2, "policy": str(EXAMPLES / "models" / "sorter"), "hardware": "1xH100"}
    job["workload"] = {"max_prompt_len": 20, "max_response_len": 20}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job | {"stages": [sft, sft | {"name": "again"}]}))
    answer = rlplan("estimate", "--trace", path, "--json")
    assert list(json.loads(answer.out)["stages"]) == ["sft", "again"], answer.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trace", "--model", "Qwen/Qwen2.5-7B", "--gpus", "1xH100"), "is not a path"),
        (("--trace", "examples/quickstart.yaml"), "--trace needs a job on GPUs"),
        (("--trace", "--model", "examples/models/sorter", "--gpus", "1xH100", "training.logits=fused"), "fused"),
    ],
)
def test_what_cannot_be_traced_is_one_message(rlplan: Call, arguments: tuple[str, ...], words: str) -> None:
    answer = rlplan("estimate", *arguments)
    assert (answer.exit_code, answer.out) == (2, "")
    assert words in answer.err


def test_an_unknown_id_without_a_network_names_the_nearest_bundled_one(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = rlplan("estimate", "--model", "meta-llama/Llama-9-8B", "--gpus", "8xH100")
    assert answer.exit_code == 4
    assert "HF_HUB_OFFLINE is set" in answer.err
    assert "Did you mean 'meta-llama/Llama-3.1-8B'?" in answer.err


def test_a_config_that_was_fetched_once_is_read_from_the_cache(
    rlplan: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "rlplan" / "configs" / "someone--model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((EXAMPLES / "models" / "decoder-160m" / "config.json").read_bytes())
    short = ("workload.max_prompt_len=100", "workload.max_response_len=100")
    assert rlplan("estimate", "--model", "someone/model", "--gpus", "1xH100", *short).exit_code == 0
