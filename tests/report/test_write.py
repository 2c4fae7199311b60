"""A report is a whole folder, says how the run went, stands alone, and leaks and trusts nothing."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlplan.errors import RunError, SpecError
from rlplan.report.evaluations import missing
from rlplan.report.run_folder import read_run_folder
from rlplan.report.run_page import render_page
from rlplan.report.summary import find, summarize
from rlplan.report.write import ReportFiles, write_report
from tests.report.factory import RunShape, make_empty_run, make_killed_run, make_run, make_run_with_own_reward
from tests.repository.at_night import mark_nightly

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _read(files: ReportFiles) -> tuple[Page, dict[str, object]]:
    return Page(files.page.read_text()), json.loads(files.summary.read_text())


def _show(run: Path, *others: Path) -> tuple[Page, dict[str, object]]:
    """The page and the summary of a run; charts are looked at in test_charts.py and test_in_chromium.py."""
    findings = find(run, others)
    summary = summarize(findings)
    return Page(render_page(findings, summary)), json.loads(json.dumps(summary, allow_nan=False))


@pytest.fixture(name="compared", scope="module")
def _write_comparison(tmp_path_factory: pytest.TempPathFactory) -> ReportFiles:
    folder = tmp_path_factory.mktemp("runs")
    shapes = {
        "main": RunShape(num_steps=40, num_devices=3),
        "seed-1": RunShape(num_steps=40, seed=1),
        "lr0": RunShape(num_steps=40, learning_rate=0),
        "shuffled": RunShape(num_steps=40, shuffle_rewards=True),
    }
    main, *others = [make_run(folder / name, shape) for name, shape in shapes.items()]
    return write_report(main, folder / "report", others)


def test_a_report_has_all_its_files_and_no_others(compared: ReportFiles) -> None:
    names = sorted(path.name for path in compared.page.parent.iterdir())
    assert names == ["index.html", "memory.csv", "metrics.csv", "report.json", "trace.json"]


def test_the_page_stands_alone_and_is_small(compared: ReportFiles) -> None:
    text = compared.page.read_text()
    page = Page(text)
    assert len(text.encode()) < 1_500_000
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"https://github.com/leeoniya/uPlot"}, "named, never asked"
    references = [value for tag, name, value in page.attributes if name in ("src", "href", "srcset", "data")]
    assert references == ["data:,"]
    assert not any(tag in ("iframe", "object") for tag, _, _ in page.attributes)
    assert "default-src 'none'" in text


def test_the_page_says_what_came_out(compared: ReportFiles) -> None:
    page, _ = _read(compared)
    assert "The run finished." in page.text
    assert "25.0 % → 95.7 %" in page.text.replace("\u00a0", " ")
    assert "+70.7 points in 40 of 40 steps" in page.text
    assert "Persistent kinds exact 5 of 5" in page.text
    assert "none of 6 predicted too small" in page.text
    for section in ("Learning", "Memory over time", "Predicted against measured", "Where the time went", "The plan"):
        assert section in page.text
    assert "rlplan run main/plan.json" in page.text
    assert "disaggregated: training on cpu:0, cpu:1; generation on cpu:2" in page.text


def test_controls_are_said_to_be_flat_and_seeds_to_have_learned(compared: ReportFiles) -> None:
    page, _ = _read(compared)
    assert re.search(r"learning rate 0 0 0 40 25\.0 % \S+ % \S+ points flat \(control\)", page.text)
    assert re.search(r"shuffled rewards 0 0\.0003 40 25\.0 % \S+ % \S+ points flat \(control\)", page.text)
    assert re.search(r"seed 1 1 0\.0003 40 25\.0 % \S+ % \+\S+ points learned", page.text)


def test_the_summary_is_data_with_accuracy_exactness_and_peak_errors(compared: ReportFiles) -> None:
    summary = json.loads(compared.summary.read_text())
    assert summary["schema_version"] == 2
    assert [run["label"] for run in summary["learning"]] == ["seed 0", "seed 1", "learning rate 0", "shuffled rewards"]
    main = summary["learning"][0]
    accuracy, formats = main["evaluations"]
    assert (accuracy["metric"], accuracy["before"]) == ("evaluate/greedy_accuracy", 0.25)
    assert accuracy["after"] == pytest.approx(0.957, abs=1e-3)
    assert (formats["metric"], formats["before"], formats["after"]) == ("evaluate/format_accuracy", 0.9, 0.97)
    kinds = {row["kind"]: row["is_exact"] for row in summary["memory"]["persistent_kinds"]}
    assert kinds == dict.fromkeys(["weights", "gradients", "master_weights", "optimizer", "kv_cache"], True)
    assert summary["memory"]["packed_weights"]["error_fraction"] == 0
    for peak in summary["memory"]["process_peaks"]:
        assert peak["error_fraction"] == pytest.approx(0.0526, abs=1e-3)
        assert peak["is_within_tolerance"] is True
    seconds = {(row["part"], row["action_id"]): row for row in summary["seconds_per_action"]}
    assert seconds[("step", "generate")]["count"] == 39, "the first step is apart"
    assert seconds[("step", "generate")]["mean_s"] == pytest.approx(1.4)
    assert seconds[("step", "evaluate")]["count"] == 4
    assert seconds[("finish", "checkpoint")]["share"] is None
    assert 0.3 < seconds[("step", "generate")]["share"] < 0.6


def test_the_tables_hold_every_step_and_every_sample(compared: ReportFiles) -> None:
    with compared.metrics.open() as file:
        metrics = list(csv.DictReader(file))
    assert [int(row["step"]) for row in metrics] == list(range(41))
    assert float(metrics[7]["throughput/tokens_per_sec"]) > 8000
    assert metrics[0]["evaluate/greedy_accuracy"] == "0.25"
    with compared.memory.open() as file:
        memory = list(csv.DictReader(file))
    row = next(row for row in memory if (row["step"], row["action_id"], row["kind"]) == ("5", "generate", "kv_cache"))
    assert (row["predicted_bytes"], row["measured_bytes"], row["exact"]) == ("67108864", "67108864", "True")


@pytest.fixture(name="hostile", scope="module")
def _hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportFiles, ReportFiles]:
    """A failed run whose name and message are markup and name paths of this machine, written twice."""
    folder = tmp_path_factory.mktemp("hostile")
    message = (
        f"gone: '{folder}/run/logs/x.log' and /srv/me/secret/place.txt "
        '<script>alert("x")</script> & <img src=//x.example>'
    )
    run = make_run(folder / "<b>run", RunShape(num_steps=2, state="failed", message=message))
    return write_report(run, folder / "a"), write_report(run, folder / "b")


def test_the_same_run_gives_the_same_bytes_again(hostile: tuple[ReportFiles, ReportFiles]) -> None:
    first, second = hostile
    for path in first.page.parent.iterdir():
        assert path.read_bytes() == (second.page.parent / path.name).read_bytes(), path.name


def test_no_output_names_a_path_of_this_machine(hostile: tuple[ReportFiles, ReportFiles]) -> None:
    files, _ = hostile
    for path in files.page.parent.iterdir():
        data = path.read_bytes()
        assert str(files.page.parent.parent).encode() not in data
        assert b"/srv/me" not in data
    assert "gone: '…/x.log' and …/place.txt" in Page(files.page.read_text()).text


def test_free_text_is_escaped(hostile: tuple[ReportFiles, ReportFiles]) -> None:
    text = hostile[0].page.read_text()
    assert "<script>alert" not in text
    assert "<b>run" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; &lt;img" in text
    assert "&lt;b&gt;run" in text


def test_a_killed_run_has_a_report_that_says_so(tmp_path: Path) -> None:
    page, summary = _show(make_killed_run(tmp_path / "run"))
    assert "The run left no readable status" in page.text
    assert "No evaluation on held-out prompts was recorded. Missing: evaluate/greedy_accuracy" in page.text
    assert summary["learning"][0]["evaluations"] == []  # type: ignore[index]


@pytest.mark.nightly
def test_a_run_that_was_stopped_before_its_second_evaluation_says_so(tmp_path: Path) -> None:
    page, _ = _show(make_run(tmp_path / "run", RunShape(num_steps=40, stops_after=3, state="interrupted")))
    assert "25.0 % before; no later evaluation, 3 of 40 steps" in page.text


def test_a_job_with_its_own_reward_is_reported_by_that_rewards_name(tmp_path: Path) -> None:
    page, summary = _show(*(make_run_with_own_reward(tmp_path / name) for name in ("run", "again")))
    assert "length_score, held out \u22123 \u2192 4.068 +7.068 in 6 of 6 steps" in page.text.replace("\u00a0", " ")
    assert "accuracy" not in page.text.lower()
    assert re.search(r"seed 0 \(run\) 0 0\.0003 6 \u22123 4\.068 \+7\.068 rose", page.text)
    (evaluation,) = summary["learning"][0]["evaluations"]  # type: ignore[index]
    assert (evaluation["metric"], evaluation["is_share"], evaluation["before"]) == (
        "evaluate/length_score",
        False,
        -3.0,
    )


def test_a_job_that_only_a_learned_reward_judges_says_that_nothing_was_evaluated(tmp_path: Path) -> None:
    run = read_run_folder(make_killed_run(tmp_path / "run"))
    job = run.plan.job.model_copy(update={"rewards": ()})
    text = missing(replace(run, plan=run.plan.model_copy(update={"job": job})))
    assert text.startswith("No evaluation on held-out prompts: the job has neither a rule nor an environment")


@pytest.mark.parametrize(
    ("state", "words"),
    mark_nightly(
        [("interrupted", "The run was interrupted"), ("running", "was still active"), ("odd", "'odd'")], but=1
    ),
)
def test_the_state_of_a_run_is_said_in_words(tmp_path: Path, state: str, words: str) -> None:
    page, _ = _show(make_run(tmp_path / "run", RunShape(stops_after=1, state=state, message="stopped by SIGTERM")))
    assert words in page.text.replace("&#39;", "'")
    assert "Exit code 5. stopped by SIGTERM" in page.text


def test_a_run_that_measured_nothing_has_a_report_without_numbers(tmp_path: Path) -> None:
    files = write_report(make_empty_run(tmp_path / "run"), tmp_path / "report")
    page, summary = _read(files)
    assert "The run failed" in page.text
    assert "No evaluation on held-out prompts was recorded. Missing: evaluate/greedy_accuracy" in page.text
    assert "Persistent kinds exact unknown" in page.text
    assert "No action was timed." in page.text
    assert summary["memory"]["host_peak"]["measured_bytes"] is None  # type: ignore[index]
    assert files.memory.read_text().count("\n") == 1


def test_a_prediction_that_is_too_small_is_the_headline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RunShape(num_steps=2))
    lines = (run / "trace.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        if row.get("process") == "rollout_engine/0" and row.get("statistic") == "peak" and row["kind"] == "total":
            row["num_bytes"] *= 2
    (run / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _ = _show(run)
    assert re.search(r"Worst process peak \u2212\d+\.\d % rollout_engine/0; 1 of 5 predicted too small", page.text)


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RunShape(num_steps=1))
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "index.html").symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left on device"):
        write_report(run, tmp_path / "full")
    with pytest.raises(SpecError, match="cannot be written"):
        write_report(run, tmp_path / "file")


def test_a_compared_folder_that_is_no_run_is_one_message(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RunShape(num_steps=1))
    with pytest.raises(SpecError, match="there is no folder"):
        write_report(run, tmp_path / "report", [tmp_path / "nothing"])
    assert not (tmp_path / "report").exists()


def test_reporting_imports_no_engine_and_opens_no_window() -> None:
    code = (
        "import sys, rlplan.report.write; "
        "print([name for name in ('torch', 'ray', 'vllm', 'deepspeed', 'matplotlib.pyplot') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_numbers_that_overflowed_leave_a_report_that_can_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", RunShape(num_steps=2))
    names = ("kl/mean", "sync/logprob_difference_max", "evaluate/greedy_accuracy")
    row = {"step": 2, "reward/mean": 0.5} | dict.fromkeys(names, float("inf"))
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    files = write_report(run, tmp_path / "report")
    _read(files)
    assert "Infinity" not in "".join(re.findall('application/json">(.*?)</script>', files.page.read_text()))
