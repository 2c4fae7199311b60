"""Each command's answer: JSON that parses and stands alone, tables that say what the library says, and the help."""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from rlplan_cli import app as app_module
from rlplan_cli.app import app
from rlplan_cli.commands.doctor import show_findings
from rlplan_cli.render import terminal

from rlplan.emit.bundle import read_bundle
from rlplan.planner.answers.plan_results import estimate_as_json
from rlplan.planner.plan import read_plan
from rlplan.planner.search import find_best_plan, find_plan
from rlplan.runtime.host.finding import Finding
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.spec.files.job_file import load_job
from rlplan.spec.hardware.catalogue import get_profile, load_profiles
from rlplan.units import format_bytes, format_seconds
from rlplan.vocabulary import Placement
from tests.cli.conftest import Answer, Call, start
from tests.factories import QUICKSTART, ROOT
from tests.repository.at_night import mark_nightly

FOREIGN = ("import", "check")
COMMANDS = (
    "ui",
    "init",
    "estimate",
    "plan",
    "explain",
    "simulate",
    "compare",
    "solve",
    *FOREIGN,
    "emit",
    "run",
    "watch",
    "rollouts",
    "report",
    "accuracy",
    "calibrate",
    "doctor",
    "profiles",
    "docs",
    "schema",
)


def json_of(answer: Answer) -> Any:
    assert answer.exit_code == 0, answer.err
    return json.loads(answer.out)


def test_the_help_lists_every_command_with_a_whole_sentence(rlplan: Call) -> None:
    answer = rlplan("--help")
    assert answer.exit_code == 0
    assert answer.err == ""
    listed = dict(re.findall(r"^  (\w+) +(\S.+)$", answer.out.partition("Commands:")[2], re.MULTILINE))
    assert tuple(listed) == COMMANDS
    for sentence in listed.values():
        assert sentence.endswith(".")
        assert not sentence.endswith("...")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_help_is_the_first_sentence_of_the_command_s_own(rlplan: Call, name: str) -> None:
    own = " ".join(rlplan(name, "--help").out.partition("\n\n")[2].partition("\n\n")[0].split())
    assert app_module.COMMANDS[name]["help"] == own.partition(". ")[0].removesuffix(".") + "."


@pytest.mark.parametrize("command", [*COMMANDS, "profiles list", "profiles show"])
def test_every_command_explains_itself_and_has_at_most_twelve_options(rlplan: Call, command: str) -> None:
    answer = rlplan(*command.split(), "--help")
    assert answer.exit_code == 0
    assert answer.out.startswith(f"Usage: rlplan {command} ")
    options = re.findall(r"^ +(-[-\w]+)", answer.out.partition("Options:")[2], re.MULTILINE)
    assert len(options) <= 12


def leaf_commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    leaves = {}
    for name in COMMANDS:
        command = group.get_command(None, name)
        inner = getattr(command, "commands", None)
        leaves |= {f"{name} {key}": value for key, value in inner.items()} if inner else {name: command}
    return leaves


@pytest.mark.parametrize(("name", "command"), leaf_commands().items(), ids=str)
def test_every_command_can_answer_in_json(name: str, command: Any) -> None:
    assert name in ("schema", "ui") or any("--json" in parameter.opts for parameter in command.params), name


def test_without_a_command_the_help_is_shown(rlplan: Call) -> None:
    for arguments in ([], ["profiles"]):
        answer = rlplan(*arguments)
        assert (answer.exit_code, answer.out) == (2, "")
        assert answer.err.startswith("Usage: rlplan")


def test_estimate_prints_the_library_s_value(rlplan: Call) -> None:
    value = json_of(rlplan("estimate", QUICKSTART, "--json"))
    assert value == json.loads(json.dumps(estimate_as_json(find_best_plan(load_job(QUICKSTART)))))
    assert value["schema_version"] == 4


def test_plan_prints_and_writes_a_plan_that_can_be_read(rlplan: Call, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    answer = rlplan("plan", QUICKSTART, "workload.num_steps=4", "-o", path, "--json")
    expected = find_plan(load_job(QUICKSTART, ["workload.num_steps=4"]))
    assert read_plan(path) == expected
    assert answer.err.startswith(f"plan written to {path}; `rlplan explain {path}` explains it")
    assert answer.err.endswith(f"`rlplan run {path}` runs it\n")
    (tmp_path / "printed.json").write_text(json.dumps(json_of(answer)))
    assert json_of(answer)["schedule"] == json.loads(path.read_text())["schedule"]


def test_emit_lists_the_files_that_it_wrote(rlplan: Call, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    value = json_of(rlplan("emit", QUICKSTART, "-o", bundle, "--json"))
    assert value["schema_version"] == 1
    assert value["folder"] == str(bundle)
    assert sorted(value["files"]) == sorted(str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file())
    assert read_bundle(bundle).job == find_plan(load_job(QUICKSTART)).job
    plain = rlplan("emit", QUICKSTART, "-o", bundle)
    assert plain.out.splitlines() == [str(bundle / name) for name in value["files"]]
    assert plain.err == f"run it with `rlplan run {bundle}`\n"


def test_job_plan_and_bundle_agree(rlplan: Call, tmp_path: Path) -> None:
    assert rlplan("plan", QUICKSTART, "-o", tmp_path / "plan.json").exit_code == 0
    entry = json_of(rlplan("estimate", QUICKSTART, "--json"))
    two = json_of(rlplan("estimate", tmp_path / "plan.json", "--json"))
    assert entry == two
    assert rlplan("emit", tmp_path / "plan.json", "-o", tmp_path / "bundle").exit_code == 0
    assert read_plan(tmp_path / "bundle" / "plan.json") == read_plan(tmp_path / "plan.json")


def test_profiles_are_listed_and_shown_with_every_source(rlplan: Call) -> None:
    listed = json_of(rlplan("profiles", "list", "--json"))
    assert [row["name"] for row in listed["profiles"]] == list(load_profiles())
    profiles = {"cpu-host": get_profile("cpu-host", where="test")}
    for name, profile in profiles.items():
        assert json_of(rlplan("profiles", "show", name, "--json")) == profile.model_dump(mode="json")
        table = rlplan("profiles", "show", name).out
        shown = "".join(table.split())
        for part in (profile.process_overheads, profile.process_slack):
            for key, value in part:
                assert key in table
                assert format_bytes(value.value) in table
                assert value.source.split(",")[0].split()[-1] in shown


def test_the_doctor_answers_in_json_with_a_fix_for_what_is_wrong(rlplan: Call) -> None:
    answer = rlplan("doctor", "--json")
    value = json.loads(answer.out)
    assert value["schema_version"] == 1
    findings = {finding["subject"]: finding for finding in value["findings"]}
    assert {"Python", "C++ compiler", "torch", "ray", "memory", "/dev/shm"} <= set(findings)
    states = {finding["state"] for finding in findings.values()}
    assert states <= {"ok", "warning", "missing"}
    assert answer.exit_code == (4 if "missing" in states else 0)
    assert all((finding["state"] == "ok") == (finding["fix"] == "") for finding in findings.values())
    table = rlplan("doctor")
    assert table.exit_code == answer.exit_code
    assert all(subject in table.out for subject in findings)


def test_the_estimate_s_tables_say_what_the_ledger_says(rlplan: Call) -> None:
    plan = find_plan(load_job(QUICKSTART))
    out = rlplan("estimate", QUICKSTART, "-v").out
    peak = plan.ledger.host_peak()
    assert out.startswith(f"fits  sorter, grpo, 2x cpu-host: peak {format_bytes(peak.num_bytes)} of 8.00 GiB (")
    assert f"in {peak.action_id}" in out.splitlines()[0]
    for process in plan.ledger.processes:
        (line,) = [line for line in out.splitlines() if line.startswith(f" {process} ")][:1]
        assert format_bytes(plan.ledger.process_peak(process).num_bytes) in line
    for action in plan.schedule.step:
        if action.processes:
            assert action.id in out


def test_the_plan_s_tables_name_every_action_and_every_placement(rlplan: Call) -> None:
    plan = find_plan(load_job(QUICKSTART))
    out = rlplan("plan", QUICKSTART, "-v").out
    assert all(action.id in out for action in plan.schedule.step)
    assert "evaluate, every 10" in out
    for entry in plan.considered:
        assert f"{entry.name}: {entry.reason}" in out
    assert {entry.placement for entry in plan.considered} | {plan.schedule.placement} == set(Placement)
    assert all(format_seconds(entry.seconds) in out for entry in plan.runners_up)


@pytest.mark.parametrize(
    "arguments",
    mark_nightly([(["estimate", QUICKSTART],), (["profiles", "list"],), (["estimate", "nowhere.yaml"],)], but=1),
    ids=["estimate", "profiles", "wrong"],
)
def test_a_pipe_gets_plain_text_whole_lines_and_nothing_cut_off(arguments: list[Any]) -> None:
    answer = start(*arguments, TERM="xterm-256color")
    for stream in (answer.out, answer.err):
        assert "\x1b" not in stream
        assert "…" not in stream
    if answer.exit_code == 2:
        assert len(answer.err.splitlines()) == 4


@pytest.mark.parametrize(
    "arguments",
    mark_nightly(
        [(["emit", QUICKSTART, "-o"],), (["doctor"],), (["plan", QUICKSTART],), (["profiles", "show", "cpu-host"],)],
        but=2,
    ),
    ids=["emit", "doctor", "plan", "profiles"],
)
def test_commands_that_start_nothing_import_no_engine(arguments: list[Any], tmp_path: Path) -> None:
    if arguments[-1] == "-o":
        arguments = [*arguments, tmp_path / "bundle"]
    program = (
        "import atexit, pathlib, sys\n"
        "out = pathlib.Path(sys.argv.pop(1))\n"
        "atexit.register(lambda: out.write_text(' '.join(sorted({name.split('.')[0] for name in sys.modules}))))\n"
        "from rlplan_cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "modules", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 4), done.stderr
    loaded = set((tmp_path / "modules").read_text().split())
    assert "rlplan" in loaded
    assert not loaded & {"torch", "ray", "vllm", "deepspeed", "transformers", "pandas", "matplotlib", "numpy"}


GONE = {
    "--help": "| true",
    f"estimate {QUICKSTART}": "2>&1 | true",
    f"estimate {QUICKSTART} --json": "| true",
    "estimate --model Qwen/Qwen2.5-7B --gpus 8xH100": "| true",
    "estimate --model Qwen/Qwen2.5-7B --gpus 1xRTX4090": "2>&1 | true",
    "profiles list": "| true",
}
"""Kind of reader for each command in `make test`; `make nightly` tries all readers for all commands."""
ALSO_NIGHTLY = (
    f"estimate {QUICKSTART} --json",
    "estimate --model Qwen/Qwen2.5-7B --gpus 8xH100",
    "estimate --model Qwen/Qwen2.5-7B --gpus 1xRTX4090",
    "profiles list",
)
READERS = [
    pytest.param(
        command.split(),
        reader,
        id=f"{command[-40:]} {reader}",
        marks=() if reader == usual and command not in ALSO_NIGHTLY else pytest.mark.nightly,
    )
    for command, usual in GONE.items()
    for reader in ("| true", "2>&1 | true")
]


@pytest.mark.parametrize(("arguments", "reader"), READERS)
def test_a_reader_that_has_gone_hears_no_complaint_and_leaves_the_exit_code_of_sigpipe(
    arguments: list[Any], reader: str
) -> None:
    """Never 1, which says that nothing fits: a script with `pipefail` looks at it."""
    command = shlex.join([sys.executable, "-m", "rlplan_cli", *map(str, arguments)])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {reader}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scale_seconds(60),
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 141)


def test_a_reader_that_leaves_early_has_what_it_wanted() -> None:
    command = shlex.join([sys.executable, "-m", "rlplan_cli", "estimate", str(QUICKSTART), "--json"])
    words = ["bash", "-c", f"set -o pipefail; {command} | head -c 100"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=scale_seconds(60), check=False)
    assert (done.stderr, len(done.stdout), done.returncode) == ("", 100, 141)


def test_words_in_brackets_are_printed_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither suggested commands nor names chosen by users are markup."""
    show_findings([Finding("pandas", "warning", "[red]", "pip install 'rlplan[report]' :warning:")])
    terminal.stdout.print("runs/[bold]/plan.json")
    out = capfd.readouterr().out
    assert "pip install 'rlplan[report]' :warning:" in out
    assert "[red]" in out
    assert "runs/[bold]/plan.json" in out


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = [re.sub(r"\s+", " ", code) for code in re.findall(r"(?<!`)`(rlplan [^`]+)`(?!`)", text)]
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    commands = [*lines, *inline]
    return [line for line in commands if line.startswith(("rlplan estimate ex", "rlplan plan ex", "rlplan profiles "))]


def test_the_commands_of_the_readme_do_what_it_promises(rlplan: Call, tmp_path: Path) -> None:
    commands = readme_commands()
    assert commands
    for command in commands:
        words = shlex.split(command)[1:]
        arguments = [str(tmp_path / word) if re.fullmatch(r"\w+\.json", word) else word for word in words]
        answer = rlplan(*arguments)
        assert answer.exit_code == 0, f"{command}\n{answer.err}"


def test_the_version_is_the_package_s(rlplan: Call) -> None:
    answer = rlplan("--version")
    assert (answer.exit_code, answer.out) == (0, f"rlplan {version('rlplan')}\n")


def test_a_job_is_simulated_with_the_staleness_that_it_allows(rlplan: Call) -> None:
    answer = rlplan("simulate", ROOT / "examples" / "maturity" / "5-async.yaml", "--steps", 4)
    assert (answer.exit_code, answer.err) == (0, "")
    for words in (
        "sorter, grpo, 2x cpu-host: ",
        "disaggregated: ",
        "on average over 4 simulated steps",
        "Utilization",
        "1 old",
    ):
        assert words in answer.out
    assert rlplan("simulate", ROOT / "examples" / "quickstart.yaml", "--steps", 0).exit_code == 2


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--lora-r 16 --gpu 8xh100", ["lora_r=16", "gpu=8xh100"]),
        ("--set rollout.tp=2 --rollout-tp 4", ["rollout.tp=2", "rollout.tp=4"]),
        ("--gpus 8xh100 --qlora --nonsense 3", ["--gpus", "8xh100", "qlora=true", "--nonsense", "3"]),
    ],
)
def test_an_option_that_names_a_key_is_an_override(words: str, read: list[str]) -> None:
    command = app_module._load_command("estimate")
    assert app_module._read_options(command, words.split()) == read


@pytest.mark.parametrize(("typed", "meant"), [("models", "profiles models"), ("profile h100", "profiles show h100")])
def test_other_words_for_a_command_are_understood(typed: str, meant: str, rlplan: Call) -> None:
    assert rlplan(*typed.split()).out == rlplan(*meant.split()).out != ""
