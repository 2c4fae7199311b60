"""Rollouts are kept as Parquet, a file a step: whole or not at all, within the limit, as other tools read them."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlplan.errors import SpecError
from rlplan.planner.plan import write_plan
from rlplan.runtime.rollout.experience import Completion, Prompt, Rollout, WeightSpan
from rlplan.runtime.run_folder.reading_rollouts import choose_rollouts
from rlplan.runtime.run_folder.recorder import Recorder
from rlplan.runtime.run_folder.rollout_files import FOLDER, RolloutFiles, list_step_files
from rlplan.spec.parts.conduct import MetricsSpec
from tests.factories import make_plan


def spell(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def make_rollout(number: int, text: str = "ab", **fields: object) -> Rollout:
    tokens = tuple(map(ord, text))
    completion = Completion(tokens, (-0.5,) * len(tokens), "stop", (WeightSpan(3, 0, 1), WeightSpan(4, 1, len(tokens))))
    rollout = Rollout(Prompt(f"p{number // 2}", "1 + 1?", "2", (7, 8)), number // 2, completion, text, id=f"r/{number}")
    rollout.rewards, rollout.reward, rollout.advantage = {"right": float(number)}, 2.0 * number, number - 0.5
    rollout.advantages = (rollout.advantage,) * len(tokens)
    for name, value in fields.items():
        setattr(rollout, name, value)
    return rollout


def keep(folder: Path, step: int, rollouts: list[Rollout], **settings: int) -> None:
    files = RolloutFiles(folder)
    files.begin(step, rollouts, MetricsSpec(**settings), spell)  # type: ignore[arg-type]
    files.settle()
    files.close()


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of the last step, as pandas reads them."""
    return list(pd.read_parquet([*list_step_files(folder).values()][-1]).to_dict("records"))


def test_pandas_reads_what_a_step_has_made(tmp_path: Path) -> None:
    talk = Completion(tuple(map(ord, "hi<ok>bye")), (-1.0,) * 5, "length", observed=((2, 6),), num_turns=2)
    rollouts = [
        make_rollout(0, scores={"policy": (-0.25, -0.75)}),
        make_rollout(1, rewards={"right": 1.0, "short": 0.5}, scores={"policy": (-1.0, -2.0), "reward": (3.0,)}),
        make_rollout(2, completion=talk, text="hibye", failure="right: it raised", has_failed=True, rewards={}),
    ]
    keep(tmp_path, 12, rollouts)
    frame = pd.read_parquet(tmp_path / FOLDER / "step-000012.parquet")
    assert list(frame["id"]) == ["r/0", "r/1", "r/2"]
    assert list(frame["step"]) == [12] * 3
    assert list(frame["prompt_tokens"][0]) == [7, 8]
    assert [list(row) for row in frame["tokens"][:2]] == [[97, 98]] * 2
    assert [list(row) for row in frame["logprobs"][:2]] == [[-0.5, -0.5]] * 2
    assert [list(row) for row in frame["trainer_logprobs"]] == [[-0.25, -0.75], [-1.0, -2.0], []]
    assert [list(row) for row in frame["versions"]] == [[3, 4], [3, 4], []]
    assert frame["version"].isna().tolist() == [False, False, True], "the oldest version, if any is known"
    assert list(frame["reward/right"])[:2] == [0.0, 1.0]
    assert frame["reward/right"].isna().tolist() == [False, False, True]
    assert frame["reward/short"].isna().tolist() == [True, False, True]
    assert "reward_logprobs" not in frame
    assert list(frame["is_truncated"]) == [False, False, True]
    assert frame["failure"][2] == "right: it raised"
    turns = [(turn["role"], turn["text"]) for turn in frame["turns"][2]]
    assert turns == [("policy", "hi"), ("environment", "<ok>"), ("policy", "bye")]


def test_answers_of_the_data_and_odd_texts_are_kept_too(tmp_path: Path) -> None:
    answer = Rollout(Prompt("p", "\ud83d?", "", (1,)), 0, Completion((104, 105), (0.0, 0.0), "stop"))
    keep(tmp_path, 1, [answer])
    (row,) = read(tmp_path)
    assert (row["text"], row["prompt"]) == ("hi", "??")
    assert pd.isna(row["version"])


def test_a_step_that_is_done_again_replaces_its_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        keep(tmp_path, 1, [make_rollout(0, text)])
    assert [row["text"] for row in read(tmp_path)] == ["second"]


def test_a_resumed_run_has_only_files_up_to_its_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        keep(tmp_path, step, [make_rollout(0)])
    (tmp_path / FOLDER / "step-000004.partial").write_bytes(b"PAR1")
    Recorder(tmp_path, {}, 2).close()
    assert [path.name for path in sorted((tmp_path / FOLDER).iterdir())] == [
        "step-000001.parquet",
        "step-000002.parquet",
    ]
    Recorder(tmp_path, {}).close()
    assert not list_step_files(tmp_path)


def test_the_oldest_steps_are_deleted_above_the_limit(tmp_path: Path) -> None:
    keep(tmp_path, 1, [make_rollout(0)])
    size = list_step_files(tmp_path)[1].stat().st_size
    for step in (2, 3, 4):
        keep(tmp_path, step, [make_rollout(0)], max_rollout_bytes=2 * size + 1)
    assert [*list_step_files(tmp_path)] == [3, 4]
    keep(tmp_path, 5, [make_rollout(0)], max_rollout_bytes=1)
    assert [*list_step_files(tmp_path)] == [5], "the newest stays"
    keep(tmp_path, 6, [make_rollout(0)], max_rollout_bytes=0)
    assert [*list_step_files(tmp_path)] == [5], "none is written"
    keep(tmp_path, 7, [make_rollout(number) for number in range(4)], max_rollouts_per_step=3)
    assert len(read(tmp_path)) == 3


WRITE_ON = """
import sys
from pathlib import Path
from tests.runtime.run_folder.test_rollout_files import keep, make_rollout
sys.modules.pop("pandas")
rollouts = [make_rollout(number, "text" * 50) for number in range(400)]
for step in range(1, 10000):
    keep(Path(sys.argv[1]), step, rollouts)
    print("pandas" in sys.modules, flush=True)
"""


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_ON, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["False\n"] * 2, "Arrow has not imported pandas"
        time.sleep(0.013)
        process.kill()
    files = list_step_files(tmp_path)
    assert len(files) >= 2
    assert {len(pd.read_parquet(path, columns=["id"])) for path in files.values()} == {400}


LIMITED = """
import resource, signal, sys
from pathlib import Path
from rlplan.errors import RunError
from tests.runtime.run_folder.test_rollout_files import keep, make_rollout
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    keep(Path(sys.argv[1]), 1, [make_rollout(0)])
except RunError as error:
    print(error.what)
"""


def test_a_disk_that_takes_no_more_ends_the_run_in_words(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("step-000001.parquet cannot be written: it may not become larger"), done.stderr
    assert not [*(tmp_path / FOLDER).iterdir()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_plan(make_plan(), tmp_path / "plan.json")
    for name in ("trace.jsonl", "metrics.jsonl"):
        (tmp_path / name).touch()
    for step in (1, 2):
        keep(tmp_path, step, [make_rollout(number, reward=(number * 5) % 7) for number in range(step, 6)])
    return tmp_path


def test_rollouts_are_chosen_by_step_and_rank(run: Path) -> None:
    assert [row["id"] for row in choose_rollouts(run)] == ["r/2", "r/3", "r/4", "r/5"], "of the last step"
    assert len(choose_rollouts(run, (1, 2))) == 9
    assert [row["reward"] for row in choose_rollouts(run, count=2)] == [6.0, 4.0]
    assert [row["reward"] for row in choose_rollouts(run, count=2, is_best=False)] == [1.0, 3.0]
    assert [row["id"] for row in choose_rollouts(run, count=1, reward="right")] == ["r/5"]
    assert choose_rollouts(run, truncated_only=True) == []
    assert choose_rollouts(run, with_tokens=True, count=1)[0]["tokens"] == [97, 98]


@pytest.mark.parametrize(
    ("choice", "what"),
    [({"steps": (9,)}, "of step 9 are not there"), ({"reward": "other"}, "no rollout has the reward other")],
)
def test_what_is_not_there_is_said(run: Path, choice: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        choose_rollouts(run, **choice)


def test_an_old_run_folder_is_told_from_one_that_kept_none(tmp_path: Path) -> None:
    write_plan(make_plan(), tmp_path / "plan.json")
    (tmp_path / "trace.jsonl").touch()
    with pytest.raises(SpecError, match="the run has kept no rollouts"):
        choose_rollouts(tmp_path)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(SpecError, match="an earlier rlplan"):
        choose_rollouts(tmp_path)
    write_plan(make_plan(**{"metrics.max_rollout_bytes": 0}), tmp_path / "plan.json")
    (tmp_path / "samples.jsonl").unlink()
    with pytest.raises(SpecError, match="told to keep no rollouts"):
        choose_rollouts(tmp_path)


@pytest.mark.parametrize("column", ["text", "reward", "turns", "is_truncated", "reward/right"])
def test_a_file_of_another_kind_is_refused_with_its_row(run: Path, column: str) -> None:
    path = list_step_files(run)[2]
    frame = pd.read_parquet(path)
    frame[column] = [json.dumps({})] * len(frame) if column != "text" else range(len(frame))
    frame.to_parquet(path)
    with pytest.raises(SpecError, match="row 1 is damaged"):
        choose_rollouts(run)
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(SpecError, match="cannot be read"):
        choose_rollouts(run)
