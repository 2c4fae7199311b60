"""Logs of other stacks as seconds of phases: each stack's own names, every form of file, and what is refused."""

import json
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.logs.read import CLOCK, MEANINGS, is_log, load_stacks, read_log
from rlplan.vocabulary import Phase

VERL_LINE = (  # verl issue 1208: the console of a run on GH200, as it was posted
    "(TaskRunner pid=16292) step:2 - global_seqlen/mean:547190.500 - actor/kl_loss:0.001 - perf/mfu/actor:1.018 - "
    "response_length/mean:324.958 - response_length/max:1024.000 - response_length/min:9.000 - "
    "response_length/clip_ratio:0.004 - prompt_length/mean:102.534 - timing_s/gen:74.020 - "
    "timing_s/old_log_prob:3.566 - timing_s/ref:3.420 - timing_s/adv:1.167 - "
    "timing_s/update_actor:14.302 - timing_s/step:96.551"
)
ROWS = {
    "verl": {"timing_s/gen": 41.0, "timing_s/ref": 2.0, "timing_s/update_actor": 20.0, "timing_s/step": 70.0},
    "TRL": {"step_time": 70.0, "completions/mean_length": 630.5, "completions/clipped_ratio": 0.25},
    "OpenRLHF": {"timing/generation": 41.0, "timing/make_experience": 2.0, "timing/ppo_train": 20.0,
                 "timing/broadcast": 1.0, "timing/step_total": 70.0},
    "slime": {"perf/rollout_time": 41.0, "perf/ref_log_probs_time": 2.0, "perf/actor_train_time": 20.0,
              "perf/train_time": 25.0, "perf/update_weights_time": 1.0, "perf/step_time": 70.0},
    "NeMo-RL": {"timing/train/generation": 41.0, "timing/train/exposed_generation": 60.0,
                "timing/train/policy_and_reference_logprobs": 2.0, "timing/train/policy_training": 20.0,
                "timing/train/prepare_for_generation/total": 1.0, "timing/train/total_step_time": 70.0},
}  # fmt: skip


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def jsonl(folder: Path, *rows: object) -> Path:
    return write(folder, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def test_a_console_line_of_verl_is_read_as_it_was_posted(tmp_path: Path) -> None:
    step = read_log(write(tmp_path, "run.log", f"some words\n{VERL_LINE}\nmore words: 3\n"))
    assert (step.stack, step.num_steps, step.step_s) == ("verl", 1, 96.551)
    assert step.phases[Phase.ROLLOUT] == 74.020
    assert step.phases[Phase.SCORE] == pytest.approx(3.566 + 3.420 + 1.167)
    assert step.phases[Phase.TRAIN] == 14.302
    assert step.lengths == {
        "mean_response_len": 324.958, "longest_response_len": 1024.0, "cut_share": 0.004, "mean_prompt_len": 102.534
    }  # fmt: skip


@pytest.mark.parametrize("stack", ROWS)
def test_every_stack_is_known_by_its_own_names(tmp_path: Path, stack: str) -> None:
    step = read_log(jsonl(tmp_path, {"step": 1, **ROWS[stack]}))
    assert (step.stack, step.step_s) == (stack, 70.0)
    if stack != "TRL":
        assert (step.phases[Phase.ROLLOUT], step.phases[Phase.TRAIN]) == (41.0, 20.0)


def test_numbers_of_numpy_are_read_and_a_version_is_no_number(tmp_path: Path) -> None:
    """numpy 2 prints its floats as `np.float64(74.02)`, and verl prints what it is given."""
    line = "step:1 - timing_s/gen:np.float64(74.02) - code/version:0.9.1 - timing_s/step:96.5"
    step = read_log(write(tmp_path, "verl.log", line + "\n"))
    assert (step.phases[Phase.ROLLOUT], step.step_s) == (74.02, 96.5)


def test_every_form_of_file_says_the_same(tmp_path: Path) -> None:
    row = ROWS["verl"]
    csv = ",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n"
    console = "step:1 - " + " - ".join(f"{key}:{value}" for key, value in row.items())
    state = {"log_history": [{"step": 1, **row}]}
    forms = [
        jsonl(tmp_path, row),
        write(tmp_path, "wrapped.jsonl", json.dumps({"step": 1, "data": row})),  # verl's file logger
        write(tmp_path, "nested.jsonl", json.dumps({"timing_s": {k.partition("/")[2]: v for k, v in row.items()}})),
        write(tmp_path, "metrics.csv", csv),
        write(tmp_path, "console.txt", console),
        write(tmp_path, "trainer_state.json", json.dumps(state)),
    ]
    assert all(map(is_log, forms))
    first = read_log(forms[0])
    assert [read_log(path).phases for path in forms] == [first.phases] * len(forms)


def test_the_first_step_warms_up_and_the_rest_are_a_median(tmp_path: Path) -> None:
    rows = [{"timing_s/gen": seconds, "timing_s/step": 2 * seconds} for seconds in (500, 40, 42, 90)]
    step = read_log(jsonl(tmp_path, {"val/score": 0.1}, *rows))
    assert (step.num_steps, step.step_s, step.phases[Phase.ROLLOUT]) == (4, 84.0, 42.0)


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    text = json.dumps(ROWS["verl"]) + "\n" + '{"timing_s/gen": 4'
    assert read_log(write(tmp_path, "metrics.jsonl", text)).num_steps == 1


def test_names_of_ones_own_are_read_in_their_unit(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"gen_ms": 41_000, "train_min": 0.5, "tokens": 812})
    fields = ["rollout=gen_ms:ms", "train=train_min:min", "mean_response_len=tokens"]
    step = read_log(path, fields)
    assert step.phases == {Phase.ROLLOUT: pytest.approx(41.0), Phase.TRAIN: pytest.approx(30.0)}
    assert step.lengths == {"mean_response_len": 812.0}
    assert step.seconds == pytest.approx(71.0)


def test_timers_that_no_table_names_are_listed(tmp_path: Path) -> None:
    step = read_log(jsonl(tmp_path, {**ROWS["verl"], "timing_s/tool_calls": 9.0, "actor/loss": 0.1}))
    assert step.unread == ("timing_s/tool_calls",)


@pytest.mark.parametrize(
    ("text", "fields", "words"),
    [
        ("", (), "neither rows nor an out-of-memory error"),
        ("\n\n", (), "neither rows nor an out-of-memory error"),
        ("{}\n", (), "neither rows nor an out-of-memory error"),
        ('{"loss": 1}\n', (), "none of 1 fields is a known timer: loss"),
        ('{"timing_s/gne": 3, "time_x": 1}\n', (), "Did you mean 'timing_s/gen'?"),
        ('{"gen_time": 3}\n', (), "--field rollout=gen_time:s"),
        ('{"gen_time": 3}\n', ("rollout=gen_time",), "has no known unit"),
        ('{"gen_time": 3}\n', ("rollout=gen_time:parsecs",), "has no known unit"),
        ('{"gen_time": 3}\n', ("rolout=gen_time:s",), "Did you mean 'rollout'?"),
        ('{"gen_time": 3}\n', ("rollout=gen_tim:s",), "Did you mean 'gen_time'?"),
        ('{"timing_s/gen": -3}\n', (), "timing_s/gen is -3"),
        ('{"timing_s/gen": 1e300}\n', (), "timing_s/gen is 1e+300"),
        ('{"timing_s/gen": 3, "response_length/clip_ratio": 55}\n', (), "response_length/clip_ratio is 55"),
        ('{"timing_s/gen": 41000, "timing_s/step": 70}\n', (), "one of them has another unit"),
        ('{"timing_s/gen": 3}\nnonsense\n{"timing_s/gen": 3}\n', (), "line 2 is no JSON"),
        ('{"timing_s/gen": NaN}\n', (), "no step has a number of seconds"),
    ],
)
def test_what_is_no_measurement_is_named_with_the_file(
    tmp_path: Path, text: str, fields: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read_log(write(tmp_path, "metrics.jsonl", text), fields)
    assert words in str(caught.value)
    assert caught.value.where in (str(tmp_path / "metrics.jsonl"), "command line: --field")


def test_a_trainer_state_without_a_history_is_refused(tmp_path: Path) -> None:
    for text in ("{}", "[]", "x"):
        with pytest.raises(SpecError, match="no log_history"):
            read_log(write(tmp_path, "trainer_state.json", text))


def test_the_table_knows_each_name_once_and_only_meanings_that_there_are() -> None:
    for stack in load_stacks():
        assert set(stack.meanings.values()) <= set(MEANINGS)
        assert set(stack.instead) | {name for names in stack.instead.values() for name in names} <= {
            *stack.meanings,
            CLOCK,
        }
    names = [name for stack in load_stacks() for name in stack.meanings]
    assert len(names) == len(set(names))
