"""The rollout engine, live: what it samples, what it says about it, and weights that change under open requests."""

from pathlib import Path
from typing import Any

import pytest

from rlplan.runtime.models.start_checkpoint import write_random_checkpoint
from tests.factories import EXAMPLES
from tests.runtime.live.live_engine import ask

pytestmark = pytest.mark.engine
ROUNDING = 1e-4
"""Between vLLM and transformers in fp32: 1e-6 to 1e-5 was seen."""
BASE_TOLERANCE = 0.05
"""Share of the bytes that an engine's own weights take."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Answers of engines on one rank."""
    return ask("alone")[0]


@pytest.fixture(scope="module")
def answers(alone: dict[str, Any]) -> Any:
    return alone["generation"]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return ask("ranks", 2)


def test_every_request_comes_back_with_all_its_samples_in_order(answers: dict[str, Any]) -> None:
    assert answers["ids"] == ["a", "b"]
    assert answers["lengths"] == [[20, 20, 20], [7, 7]]
    assert answers["reasons"] == ["length"]


def test_samples_of_one_prompt_differ_and_the_same_seeds_give_the_same_again(answers: dict[str, Any]) -> None:
    assert answers["differ"] == 3
    assert answers["repeats"]


def test_each_token_comes_with_the_log_prob_that_it_was_sampled_with(answers: dict[str, Any]) -> None:
    assert answers["difference"] < ROUNDING


def test_a_paused_engine_hears_new_requests_and_finishes_nothing(answers: dict[str, Any]) -> None:
    assert (answers["open"], answers["while_paused"]) == (1, 0)


def test_an_open_request_survives_an_update_and_says_which_weights_made_which_token(answers: dict[str, Any]) -> None:
    for spans in answers["spans"]:
        (old, first, switch), (new, second, end) = spans
        assert (old, first, new, end) == (0, 0, 7, 190)
        assert 0 < switch == second < 190
    assert all(spans == [[7, 0, 60]] for spans in answers["late_spans"])


def test_tokens_after_an_update_are_those_of_the_new_weights_alone(answers: dict[str, Any]) -> None:
    assert answers["old_difference"] < ROUNDING
    assert answers["new_difference"] < ROUNDING
    assert answers["late_difference"] < ROUNDING


def test_an_engine_whose_update_broke_off_refuses_to_generate_until_everything_was_sent_again(
    answers: dict[str, Any],
) -> None:
    of_update, of_question = answers["broken_off"]
    assert "arrival of packet 0 did not happen" in of_update
    assert "versions are mixed" in of_question
    assert answers["mended_difference"] < ROUNDING


def test_a_stopped_engine_gives_its_memory_back_and_starts_again(answers: dict[str, Any]) -> None:
    assert answers["freed"] >= 0.9 * answers["held"]
    assert answers["frozen"] > 100_000, "collections of the next start leave modules out"
    assert answers["restarted_version"] == [9]
    assert answers["restarted_difference"] < ROUNDING


@pytest.mark.nightly
def test_two_ranks_take_the_same_requests_into_the_same_steps(two_ranks: list[dict[str, Any]]) -> None:
    leader, follower = two_ranks
    assert leader["lengths"] == [[20, 20, 20], [7, 7]]
    assert leader["difference"] < ROUNDING
    assert follower["nothing"] == []


@pytest.mark.nightly
def test_an_engine_of_several_ranks_leaves_no_name_in_shared_memory(two_ranks: list[dict[str, Any]]) -> None:
    assert all(rank["shared_names"] == [] for rank in two_ranks)


@pytest.mark.nightly
def test_each_of_two_ranks_holds_what_is_predicted(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["loaded"] == rank["forecast"]["loaded"]
        assert rank["components"]["weights"] == rank["forecast"]["weights"]
        assert rank["components"]["kv_cache"] == rank["forecast"]["kv_cache"]
        assert rank["components"]["packed_weights"] <= rank["forecast"]["packed_weights"]


@pytest.fixture(scope="module")
def limits(alone: dict[str, Any]) -> Any:
    return alone["limits"]


def test_a_response_ends_with_the_text_or_the_token_that_it_stops_at(limits: dict[str, Any]) -> None:
    for tokens, reason in zip(limits["tokens"], limits["reasons"], strict=True):
        ends = [index for index, token in enumerate(tokens) if token in (4, 14)]
        assert ends == ([len(tokens) - 1] if reason == "stop" else [])
        assert reason == "stop" or len(tokens) == 60
    stopped = zip(limits["tokens"], limits["reasons"], strict=True)
    assert {tokens[-1] for tokens, reason in stopped if reason == "stop"} == {4, 14}


def test_what_a_response_stops_at_comes_with_its_log_prob(limits: dict[str, Any]) -> None:
    assert limits["logprobs"] == [len(tokens) for tokens in limits["tokens"]]
    assert limits["difference"] < ROUNDING


def test_more_prompts_than_a_batch_holds_are_computed_whole_and_repeatably(limits: dict[str, Any]) -> None:
    assert limits["num_prompt_tokens"] > 270
    assert limits["repeats"]


@pytest.fixture(scope="module")
def shared_base(alone: dict[str, Any]) -> Any:
    return alone["shared_base"]


def test_an_engine_computes_with_the_trainer_s_base_and_with_each_adapter_beside_it(
    shared_base: dict[str, Any],
) -> None:
    assert shared_base["is_the_trainer_s"], "no parameter is the engine's own"
    assert max(shared_base["before"], *shared_base["trained"]) < ROUNDING
    assert shared_base["again"] < ROUNDING, "opened once more by an engine that was stopped"


def test_an_engine_on_the_trainer_s_base_holds_what_is_predicted(shared_base: dict[str, Any]) -> None:
    for kind in ("weights", "packed_weights", "kv_cache"):
        assert shared_base["held"][kind] == shared_base["forecast"][kind]
    assert shared_base["held"]["weights"] == 0


def test_an_engine_whose_loader_makes_other_parameters_of_the_weights_refuses_them(shared_base: dict[str, Any]) -> None:
    assert "the engine's weight model.layers.0.self_attn.qkv_proj.weight (" in shared_base["refused"]
    assert "rollout.shares_base=false" in shared_base["refused"]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_base_takes_the_engine_s_own_weights_off_what_the_kernel_counts(dtype: str, tmp_path: Path) -> None:
    """Measured: proportional pages of the process, which count once however often they are mapped."""
    write_random_checkpoint(EXAMPLES / "models" / "decoder-62m", tmp_path / "drawn", 0)
    (answers,) = ask("base memory", 1, str(tmp_path / "drawn"), dtype)
    _, (apart, own_apart), (together, own_together) = answers["taken"]
    assert apart - together == pytest.approx(answers["own"], rel=BASE_TOLERANCE)
    assert own_apart - own_together == pytest.approx(answers["own"], rel=BASE_TOLERANCE)


@pytest.fixture(scope="module")
def speculative_decoding(alone: dict[str, Any]) -> Any:
    return alone["speculative_decoding"]


def test_draft_tokens_are_sampled_as_the_policy_says_at_every_temperature(speculative_decoding: dict[str, Any]) -> None:
    assert speculative_decoding["lengths"] == [60] * 9
    assert max(speculative_decoding["differences"]) < ROUNDING
    assert speculative_decoding["num_accepted"] > 20


def test_drafts_that_are_open_while_weights_change_are_recomputed(speculative_decoding: dict[str, Any]) -> None:
    assert speculative_decoding["old_difference"] < ROUNDING
    assert speculative_decoding["new_difference"] < ROUNDING


@pytest.mark.nightly
def test_two_ranks_in_16_bits_hold_what_is_predicted_and_agree_to_16_bits() -> None:
    leader, follower = ask("ranks", 2, "bfloat16")
    for rank in (leader, follower):
        assert rank["loaded"] == rank["forecast"]["loaded"]
        assert rank["components"]["weights"] == rank["forecast"]["weights"]
        assert rank["components"]["kv_cache"] == rank["forecast"]["kv_cache"]
    assert leader["difference"] < 0.1


@pytest.fixture(scope="module")
def versions(alone: dict[str, Any]) -> Any:
    return alone["versions"]


def test_what_begins_under_a_version_of_the_adapter_ends_under_it(versions: dict[str, Any]) -> None:
    assert versions["num_open"] == [1, 2, 3], "each version arrived beside requests that were open"
    for version, samples in versions["differences"].items():
        assert versions["spans"][version] == [[[int(version), 0, 200]]] * 2
        for differences in samples:
            assert differences.pop(version) < ROUNDING
            assert min(differences.values()) > 1, "no other version gives these log-probs"


def test_a_version_goes_with_the_last_request_that_it_was_begun_with(versions: dict[str, Any]) -> None:
    assert versions["held"] == [[1], [1, 2], [1, 2, 3]]
    assert versions["left"] == [3]
    assert versions["files"] == []


def test_an_engine_keeps_a_version_that_is_under_way_when_it_is_sent_for_another_one(
    versions: dict[str, Any],
) -> None:
    assert versions["keeps"]


def test_slots_and_copies_of_an_adapter_s_versions_are_predicted_to_the_byte(versions: dict[str, Any]) -> None:
    assert versions["staging"] == versions["forecast"]


def test_a_version_that_finds_no_slot_is_refused(versions: dict[str, Any]) -> None:
    assert "no free slot for the adapter of version 6: samples of versions 3, 4, 5 are running" in versions["refused"]


@pytest.mark.nightly
def test_ranks_of_an_engine_begin_with_the_same_version_whenever_each_of_them_got_it() -> None:
    leader, follower = ask("versions on ranks", 2)
    for rank in (leader, follower):
        assert rank["staging"] == rank["forecast"]
        assert [rank[name][0] for name in ("before", "between", "after")] == [[1, 1], [1, 1], [2, 2]]
        assert rank["left"] == [2]
    for name, version in (("before", "1"), ("between", "1"), ("after", "2")):
        assert max(differences[version] for differences in leader[name][1:]) < ROUNDING
