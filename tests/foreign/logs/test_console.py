"""Console output as stacks print it: the forms of public issues, with figures of our own."""

from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.foreign.logs.read import read_log
from rlplan.vocabulary import Phase

RAY = "(MegatronTrainRayActor pid=1) [2026-01-05 12:20:29] train_metric_utils.py:44 - perf 2: "
FORMS = {
    "TRL": ("{'loss': 0.01, 'completions/mean_length': 412.0, 'step_time': 17.2, 'epoch': 0.01}", 17.2, {}),
    # transformers 5 prints texts
    "TRL of texts": ("{'loss': '0.01', 'completions/mean_length': '412', 'step_time': '17.2'}", 17.2, {}),
    # huggingface/open-r1 issue 161: a length, and a bar in place of a step time
    "TRL of spring 2025": (
        ("{'loss': 0.0, 'completion_length': 412.0}\n  0%|    | 1/1000 [04:41<78:02:42, 281.24s/it]\n"
        "{'loss': 0.0, 'completion_length': 412.0}\n  0%|    | 2/1000 [09:11<78:02:42, 281.24s/it]\n"),
        270.0,
        {},
    ),
    # modelscope/ms-swift issue 5571: pasted without its first brace
    "ms-swift": (
        "'loss': 0.0, 'completions/mean_length': 412.0, 'elapsed_time': '1m 29s', 'train_speed(iter/s)': 0.05}",
        20.0,
        {},
    ),
    # modelscope/ms-swift issue 4146: the speed is the mean since the start, so the clock is read
    "ms-swift, two steps": (
        ("{'loss': 0.2, 'global_step/max_steps': '56/176', 'elapsed_time': '1h 22m 38s', 'train_speed(iter/s)': 0.1}\n"
        "{'loss': 0.2, 'global_step/max_steps': '57/176', 'elapsed_time': '1h 24m 14s', 'train_speed(iter/s)': 0.1}\n"),
        96.0,
        {},
    ),
    "OpenRLHF": (
        ("Global step 3: {'policy_loss': 0.01, 'response_length': 412.0, 'timing/make_experience': 12.0, "
        "'timing/generation': 60.5, 'timing/ppo_train': 44.2, 'timing/broadcast': 1.2, 'timing/step_total': 118.9}"),
        118.9,
        {Phase.ROLLOUT: 60.5, Phase.SCORE: 12.0, Phase.TRAIN: 44.2, Phase.SYNC: 1.2},
    ),
    "slime": (
        (f"rollout 2: {{'rollout/response_len/mean': 412.0, 'perf/rollout_time': 45.2}}\n{RAY}"
        "{'perf/update_weights_time': 0.34, 'perf/log_probs_time': 3.1,\n 'perf/actor_train_time': 12.0, "
        "'perf/train_time': 15.8, 'perf/step_time': 64.2}\n"),
        64.2,
        {Phase.ROLLOUT: 45.2, Phase.SCORE: 3.1, Phase.TRAIN: 12.0, Phase.SYNC: 0.34},
    ),
    # THUDM/slime issue 1136: without a line of all timers
    "slime's timers": (
        ("[2025-12-17 14:10:28] timer.py:32 - Timer actor_train end (elapsed: 81.3s)\n"
        "[2025-12-17 14:10:29] timer.py:32 - Timer train end (elapsed: 92.5s)\n"
        "[2025-12-17 14:10:39] timer.py:32 - Timer update_weights end (elapsed: 2.5s)\n"),
        None,
        {Phase.TRAIN: 81.3, Phase.SYNC: 2.5},
    ),
    # NVIDIA-NeMo/RL pull request 1052
    "NeMo-RL": (
        ("Training Results:\n  • Loss: 0.1\n  • Mean Generation Length: 412.0\n\nTiming:\n"
        "  • Total step time: 66.55s\n  • exposed_generation: 32.52s (48.9%)\n  • policy_training: 25.05s (37.6%)\n"
        "  • policy_and_reference_logprobs: 4.78s (7.2%)\n  • weight_sync: 0.13s (0.2%)\n"),
        66.55,
        {Phase.ROLLOUT: 32.52, Phase.TRAIN: 25.05, Phase.SCORE: 4.78, Phase.SYNC: 0.13},
    ),
    # verl-project/verl issue 1224: a terminal wrapped the line within words and numbers
    "verl": (
        ("(TaskRunner pid=3) step:1049 - actor/ppo_kl:0.0\n00 - response_length/mean:412.000 - critic/score:0.1 - c\n"
        "ritic/score/max:0.133 - timing_s/gen:74.0\n20 - timing_s/update_actor:14.3 - timing_s/step:96.5\n51\n"
        "Training Progress:  21%|##   | 1049/4984 [42:39<129:34:07, 118.54s/it]\n"),
        96.551,
        {Phase.ROLLOUT: 74.02, Phase.TRAIN: 14.3},
    ),
    # marin-community/marin issue 8653 names SkyRL's timers
    "SkyRL": (
        ("Finished: 'generate', time cost: 40.21s\nFinished: 'policy_train', time cost: 20.5s\n"
        "Finished: 'sync_weights', time cost: 2.2s\nFinished: 'step', time cost: 68.2s\n"),
        68.2,
        {Phase.ROLLOUT: 40.21, Phase.TRAIN: 20.5, Phase.SYNC: 2.2},
    ),
    # DeepSpeedExamples, dschat/utils/perf.py
    "DeepSpeed-Chat": (
        (
            "Epoch: 0 | Step: 8 | PPO Epoch: 1 | Actor Loss: 0.01\n"
            "End-to-End => Latency: 2.55s, TFLOPs: 3.29, Samples/sec: 1.57, Time/seq 0.64s, Batch Size: 4\n"
            "Generation => Latency: 1.77s, Per-token Latency 6.92 ms\nTraining   => Latency: 0.78s, TFLOPs: 8.8\n"
        ),
        2.55,
        {Phase.ROLLOUT: 1.77, Phase.TRAIN: 0.78},
    ),
    "AReaL": (
        (
            "│ timeperf/rollout │ 8.8992e+01 │ ppo_actor/update/lr │ 5.0000e-06 │\n"
            "│ timeperf/train_step │ 2.1e+01 │ timeperf/update_weights │ 3.5 │\n"
        ),
        None,
        {Phase.ROLLOUT: 88.992, Phase.TRAIN: 21.0, Phase.SYNC: 3.5},
    ),
    # PrimeIntellect-ai/prime-rl pull request 999, and the form without a name of today
    "prime-rl": (
        ("02:40:52 SUCCESS Step 1 | Time: 76.20s | Reward: 0.41 | Seq. Length: 1830.5 tokens/sample | Async Level: 1\n"
        "02:40:53 SUCCESS Step 2 |  1m 17s | Loss 0.0100 | LR 1.00e-06 | Peak Mem. 55.2 GiB\n"),
        77.0,
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".log", ".txt", ".out"])
def test_every_form_of_a_console_is_read(tmp_path: Path, form: str, suffix: str) -> None:
    text, step_s, phases = FORMS[form]
    log = tmp_path / f"run{suffix}"
    log.write_text(f"words before\n{text}\nwords after\n")
    step = read_log(log)
    assert step.step_s == pytest.approx(step_s)
    assert step.phases == pytest.approx(phases)
    assert step.lengths.get("mean_response_len", 412.0) == 412.0


def test_steps_that_generate_and_steps_that_train_on_their_rollouts_are_told_apart(tmp_path: Path) -> None:
    """huggingface/trl issue 4086: only a step that generates logs lengths."""
    generating = "{'loss': 0.1, 'completions/mean_length': 812.0, 'step_time': %s}\n"
    buffered = "{'loss': 0.1, 'step_time': %s}\n"
    log = tmp_path / "trl.log"
    log.write_text(generating % 99 + 3 * (buffered % 12) + generating % 60 + 3 * (buffered % 12))
    steps = read_log(log).optimizer_steps
    assert steps is not None
    assert (steps.generating_s, steps.buffered_s, steps.per_generation) == (60.0, 12.0, 4)


def test_an_export_of_wandb_is_read_and_one_of_two_runs_refused(tmp_path: Path) -> None:
    export = tmp_path / "wandb.csv"
    export.write_text(
        '"Step","grpo - timing_s/gen","grpo - timing_s/gen__MIN","grpo - timing_s/step"\n'
        '"1","50","50","80"\n"2","41.2","41.2","70.1"\n"3","NaN","",""\n'
    )
    step = read_log(export)
    assert (step.stack, step.step_s, step.phases) == ("verl", 70.1, {Phase.ROLLOUT: 41.2})
    history = tmp_path / "history.jsonl"
    history.write_text('{"_step": 3, "_runtime": 100.5, "train/global_step": 1, "train/step_time": 17.5}\n')
    assert (read_log(history).stack, read_log(history).step_s) == ("TRL", 17.5)
    export.write_text('"Step","a - timing_s/gen","b - timing_s/gen"\n"1","41.2","20.1"\n')
    with pytest.raises(SpecError, match="2 runs: a, b"):
        read_log(export)
