"""Phrases as people type them are read, and what is refused names a command that works at the first try.

The phrases were written by hand. The commands beside them are the resolver's own, read one by one: they guard against
changes, and prove nothing by themselves.
"""

import re
import shlex
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.sources import JobWords, is_hub_id, read_question
from rlplan.spec.files.yaml import read_yaml
from rlplan.spec.hardware.typed import is_hardware, load_machines, parse_pools
from rlplan.spec.models.names import match_model
from rlplan.spec.typed import Reading, add_override, default_overrides, read_typed
from rlplan.vocabulary import Dtype

PHRASES: list[tuple[str, str, int]] = read_yaml(Path(__file__).parent / "typed_phrases.yaml", "phrases")
LEAST = 150
OPTIONS = {"--model": "policy", "--algorithm": "algorithm", "--gpus": "hardware", "--for": "framework"}


def type_command(command: str) -> Reading:
    """Read the options and words of a printed command, as the command line does."""
    words, named = shlex.split(command), dict[str, str | None]()
    if words[0] == "rlplan":
        words = words[2:]
    rest = []
    while words:
        word = words.pop(0)
        if word in OPTIONS:
            named[OPTIONS[word]] = words.pop(0)
        else:
            rest.append(word)
    return read_typed(rest, named=named)


def test_there_are_enough_phrases() -> None:
    assert len({phrase for phrase, _, _ in PHRASES}) == len(PHRASES) >= LEAST


@pytest.mark.parametrize(("phrase", "command", "num_assumed"), PHRASES)
def test_a_phrase_is_read_or_its_way_out_works(phrase: str, command: str, num_assumed: int) -> None:
    if command.startswith("! "):
        with pytest.raises(SpecError) as caught:
            read_typed(shlex.split(phrase))
        assert caught.value.way_out == command.removeprefix("! ")
        assert (
            command.startswith(("! rlplan compare", "! rlplan solve"))
            or {"policy", "hardware"} <= type_command(caught.value.way_out).keys.keys()
        )
        return
    reading = read_typed(shlex.split(phrase))
    assert (reading.command, len(reading.assumed)) == (command, num_assumed)
    assert type_command(reading.command).command == command  # what is printed means the same when typed


def test_a_question_about_a_gpu_without_bfloat16_is_planned_in_float16() -> None:
    question = read_question("estimate", JobWords("grpo qwen3 0.6b on a colab t4"))
    assert (question.job.training.dtype, question.job.rollout.dtype) == (Dtype.FLOAT16, Dtype.FLOAT16)
    assert any("has no bfloat16" in words for words in question.assumed)


def test_a_phrase_is_a_job_with_the_gpus_and_hosts_that_were_said() -> None:
    question = read_question("plan", JobWords("qwen3 8b grpo on 2 nodes of 8 h100"))
    assert (question.job.hardware.num_devices, question.job.hardware.num_hosts) == (16, 2)
    assert question.job.policy.path.endswith("Qwen/Qwen3-8B")


def test_a_job_file_is_exact_and_a_question_may_guess() -> None:
    with pytest.raises(SpecError, match="leaves open") as caught:
        parse_pools("4090", where="hardware")
    assert caught.value.way_out == "write 1x4090"
    assert read_typed(["qwen3-8b", "4090"]).assumed


@pytest.mark.parametrize(
    ("typed", "override"),
    [
        ("lora=16", "training.lora={rank: 16}"),
        ("qlora=true", "training.lora={rank: 16, base_dtype: nf4}"),
        ("batch_size=512", "workload.num_prompts_per_step=512"),
        ("max_response_len=16k", "workload.max_response_len=16k"),
        ("deepspeed=zero3", "training.zero_stage=3"),
        ("workload.num_steps=5", "workload.num_steps=5"),
    ],
)
def test_a_short_key_is_a_key_of_a_job(typed: str, override: str) -> None:
    reading = Reading()
    add_override(reading, typed)
    assert reading.overrides == [override]


def test_a_length_with_k_is_a_number_of_tokens_in_a_job() -> None:
    job = read_question("plan", JobWords("qwen3-8b 8xH100", ["max_response_len=16k"])).job
    assert job.workload.max_response_len == 16384


def test_several_clusters_are_hardware_and_a_sentence_is_not() -> None:
    assert is_hardware("8xH100, 2 nodes of 8 a100")
    assert not is_hardware("qwen3 8b on 8xH100")


def test_a_name_without_its_size_is_asked_for() -> None:
    match = match_model("mixtral")
    assert not match.id
    assert "mistralai/Mixtral-8x7B-v0.1" in match.others


def test_a_cpu_host_gets_a_small_job_and_a_short_context_short_lengths() -> None:
    assert "workload.num_prompts_per_step=8" in default_overrides({"hardware": "cpu-host"}, ())
    short = default_overrides({"policy": "openai-community/gpt2", "hardware": "8xH100"}, ())
    assert short == ["workload.max_prompt_len=256", "workload.max_response_len=768"]
    assert default_overrides({"policy": "Qwen/Qwen3-8B", "hardware": "8xH100"}, ()) == []


def test_adapters_of_a_job_file_are_switched_off() -> None:
    reading = Reading()
    add_override(reading, "lora=false")
    assert reading.overrides == ["training.lora=null"]


def test_every_machine_of_a_cloud_names_its_source() -> None:
    machines = load_machines()
    names = {*machines["machines"], *machines["notebooks"]}
    assert [name for name in names if not name.startswith(tuple(machines["sources"]))] == []
    assert all(source.startswith("https://") or "node profile" in source for source in machines["sources"].values())
    by_name = [name for name in names if name.startswith(tuple(machines["counted_by_name"]))]
    assert by_name
    for name in by_name:
        count = re.search(r"-(\d+)[gx]", name)
        assert count
        assert machines["machines"][name].startswith(f"{count[1]}x")


def test_a_folder_with_the_name_of_a_hub_s_owner_does_not_make_an_id_a_path(tmp_path: Path) -> None:
    (tmp_path / "OpenRLHF" / "examples").mkdir(parents=True)  # a checkout
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "small" / "config.json").write_text("{}")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    names = ("OpenRLHF/Llama-3-8b-sft-mixture", "models/smal", "org/tiny", "org/large")
    assert [is_hub_id(name, tmp_path) for name in names] == [True, False, False, True]
