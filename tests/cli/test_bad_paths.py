"""Paths that no file system holds and numbers that no arithmetic takes: a message of four parts, exit 2."""

from pathlib import Path

import pytest

import rlplan as library
from rlplan.errors import SpecError
from tests.cli.conftest import Call

JOB = ("--model", "Qwen/Qwen2.5-0.5B", "--gpus", "2xH100")
LONG = "a" * 300
DEEP = "/".join(["tmp"] + ["b" * 200] * 30)
VERBS = (
    *(("report",), ("explain",), ("watch",), ("plan",), ("estimate",), ("check",), ("import",), ("simulate",)),
    *(("run", "--dry-run"), ("compare",), ("calibrate",), ("accuracy",), ("emit",), ("solve",)),
)


@pytest.mark.parametrize("path", [LONG, f"{LONG}.yaml", f"{LONG}.json", f"{LONG}/job.yaml", f"/{DEEP}"])
def test_a_path_that_is_too_long_is_a_message(rlplan: Call, path: str) -> None:
    for verb in VERBS:
        answer = rlplan(*verb, path)
        assert answer.exit_code == 2, (verb, answer.exit_code, answer.err)
        assert all(part in answer.err for part in ("error: ", "rule: ", "way out: ")), (verb, answer.err)


@pytest.mark.parametrize(
    "key", ["data.path", "policy.path", "roles.reward.path", "rollout.base_path", "hardware.profile"]
)
def test_a_key_with_a_path_that_is_too_long_is_a_message(rlplan: Call, key: str) -> None:
    answer = rlplan("plan", *JOB, f"{key}={LONG}")
    assert answer.exit_code == 2, answer.err
    assert "a bug in rlplan" not in answer.err


def test_an_output_that_is_too_long_is_a_message(rlplan: Call) -> None:
    for verb in (("plan", *JOB, "-o", LONG), ("emit", *JOB, "-o", f"{LONG}/bundle")):
        assert rlplan(*verb).exit_code == 2


def test_the_library_raises_the_same_message_for_a_path_that_is_too_long() -> None:
    for call in (library.plan, library.estimate, library.load_run, library.explain):
        with pytest.raises(SpecError, match="File name too long"):
            call(f"{LONG}.yaml")
    for call in (library.plan, library.estimate, library.explain):
        with pytest.raises(SpecError, match="is not known"):
            call(LONG)  # a word without an ending is a model


@pytest.mark.parametrize("number", ["0x" + "f" * 300, "0x" + "f" * 5000, "9223372036854775808"])
@pytest.mark.parametrize("key", ["seed", "workload.max_response_len", "hardware.num_devices", "rollout.tp"])
def test_a_whole_number_of_more_than_63_bits_is_refused_with_its_key(
    rlplan: Call, tmp_path: Path, key: str, number: str
) -> None:
    job = tmp_path / "job.yaml"
    part, dot, name = key.rpartition(".")
    text = f"{part}: {{{name}: {number}}}" if dot else f"{key}: {number}"
    job.write_text(f"policy: Qwen/Qwen2.5-0.5B\n{text}\n" + ("hardware: 2xH100\n" if part != "hardware" else ""))
    for words in ([job], [*JOB, f"{key}={number}"]):
        answer = rlplan("plan", *words)
        assert answer.exit_code == 2, answer.err
        assert "bits" in answer.err
        assert key in answer.err
