"""`rlplan solve` as a user types it: the override first, then what breaks at the next value; JSON; refusals."""

import json
import re

import pytest

from tests.cli.conftest import Call
from tests.factories import ROOT

JOB = "examples/grpo-lora-8b-1xrtx4090.yaml"


def test_the_override_that_is_printed_can_be_typed_and_the_next_value_breaks_where_it_says(rlplan: Call) -> None:
    answer = rlplan("solve", "max_response_len", JOB)
    assert (answer.exit_code, answer.err) == (0, "")
    override = answer.out.split()[0]
    assert rlplan("estimate", JOB, override).exit_code == 0
    value = int(override.partition("=")[2])
    assert re.search(rf"^At {value + 1:,}: train, on cuda:0: .* too much for a GPU", answer.out, re.MULTILINE)


def test_the_next_value_is_the_one_after(rlplan: Call) -> None:
    """tests/cli/test_every_verb.py checks the same for a plan and a bundle."""
    result = json.loads(rlplan("solve", "max_response_len", "examples/quickstart.yaml", "--json").out)
    assert result["next"]["value"] == result["value"] + 1
    assert result["schema_version"] == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("max_respons_len", JOB), 2, "Did you mean 'max_response_len'?"),
        (("max_num_seqs",), 2, "nothing to solve"),
        (("max_num_seqs", "missing.yaml"), 2, "missing.yaml"),
        (("max_num_seqs", "examples/dpo-8b-8xa100.yaml"), 2, "dpo generates nothing"),
        (("max_num_seqs", "--model", "Qwen/Qwen2.5-7B", "--gpus", "1xL4"), 1, "not even 1"),
    ],
)
def test_what_has_no_largest_value_is_one_message(
    rlplan: Call, words: tuple[str, ...], code: int, message: str
) -> None:
    assert (ROOT / JOB).is_file()
    answer = rlplan("solve", *words)
    assert (answer.exit_code, answer.out) == (code, "")
    assert message in answer.err
