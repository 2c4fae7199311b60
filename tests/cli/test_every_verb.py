"""Every verb of every form of a job, on a CPU host and on GPUs: it says the same of each, or why not."""

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlplan.units import format_bytes, format_seconds
from tests.cli.conftest import Answer, Call
from tests.factories import EXAMPLES, QUICKSTART
from tests.repository.at_night import rotate_places

DATA = {"prompts": "data/sort_digits/train.jsonl", "heldout": "data/sort_digits/heldout.jsonl"}
GPU_JOB = {
    "policy": "Qwen/Qwen2.5-0.5B",
    "algorithm": "grpo",
    "hardware": "2xH100",
    "workload": {"num_prompts_per_step": 16, "max_response_len": 512, "max_prompt_len": 256, "num_steps": 4},
    "data": {key: str(EXAMPLES / place) for key, place in DATA.items()},
    "rewards": [{"kind": "answer_matcher"}],
}
PARTIAL = {key: value for key, value in GPU_JOB.items() if key not in ("data", "rewards")}
MACHINES = ("cpu", "gpu")
FORMS = ("job", "plan", "bundle")
PLANNING = ("estimate", "plan", "explain", "simulate")


@dataclass(frozen=True)
class Named:
    """One job in every form. values: what its plan says of itself."""

    job: Path
    plan: Path
    bundle: Path
    values: dict[str, object]

    @property
    def headline(self) -> str:
        """How every page about it begins."""
        name = {"cpu-host": "sorter, grpo, 2x cpu-host"}
        profile = json.loads(self.plan.read_text())["job"]["hardware"]["profile"]
        return f"fits  {name.get(profile, 'Qwen/Qwen2.5-0.5B, grpo, 2x h100-sxm')}: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@pytest.fixture(params=MACHINES)
def named(request: pytest.FixtureRequest, rlplan: Call, folder: Path) -> Named:
    """A job, its plan and its bundle; made once, as a user makes them."""
    job, machine = QUICKSTART, folder / request.param
    if request.param == "gpu":
        job = folder / "job.yaml"
        job.write_text(json.dumps(GPU_JOB))
    if not machine.exists():
        assert rlplan("plan", job, "-o", machine / "plan.json").exit_code == 0
        assert rlplan("emit", machine / "plan.json", "-o", machine / "bundle").exit_code == 0
    results = json.loads((machine / "plan.json").read_text())["results"]
    return Named(job, machine / "plan.json", machine / "bundle", results)


@pytest.fixture(scope="module")
def answered() -> dict[tuple[str, ...], Answer]:
    return {}


@pytest.fixture
def page(rlplan: Call, answered: dict[tuple[str, ...], Answer]) -> Call:
    """Like `rlplan`, for commands that only read: the same arguments are run once."""

    def call(*arguments: object) -> Answer:
        words = tuple(map(str, arguments))
        if words[0] == "simulate" and "--steps" not in words:
            words = (*words, "--steps", "2")
        if words not in answered:
            answered[words] = rlplan(*words)
        return answered[words]

    return call


def partial(folder: Path) -> Path:
    path = folder / "partial.yaml"
    path.write_text(json.dumps(PARTIAL))
    return path


def refused(answer: Answer, code: int, *words: str) -> str:
    """The way out of a refusal of four parts."""
    assert (answer.exit_code, answer.out) == (code, ""), answer.err
    lines = answer.err.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "where", "rule", "way out"], answer.err
    for word in words:
        assert word in answer.err
    return lines[3].partition("way out: ")[2]


@pytest.mark.parametrize(("form", "verb"), rotate_places(FORMS, PLANNING))
def test_what_is_planned_is_the_same_of_every_form(page: Call, named: Named, verb: str, form: str) -> None:
    answer = page(verb, getattr(named, form))
    assert (answer.exit_code, answer.err) == (0, "")
    assert answer.out.startswith(named.headline)
    peak, step = named.values["peak_bytes"], named.values["step"]
    assert isinstance(peak, dict)
    assert isinstance(step, dict)
    if verb in ("estimate", "plan", "explain"):
        assert format_bytes(peak["expected"]) in answer.out
    if verb != "estimate":
        assert f"{format_seconds(step['seconds'])} per step" in answer.out.splitlines()[0]


def forms_say_the_same(page: Call, named: Named, *words: object) -> dict[str, Any]:
    """The common answer for every form of a job; `FORM` among the words stands for the form."""
    answers = [page(*(getattr(named, form) if word == "FORM" else word for word in words)) for form in FORMS]
    assert {(answer.exit_code, answer.err) for answer in answers} == {(0, "")}
    assert len({answer.out for answer in answers}) == 1
    result: dict[str, Any] = json.loads(answers[0].out)
    return result


def test_a_form_is_solved_as_its_job(page: Call, named: Named) -> None:
    result = forms_say_the_same(page, named, "solve", "max_num_seqs", "FORM", "--json")
    assert result["override"] == f"rollout.max_num_seqs={result['value']}"


def test_a_form_is_compared_as_its_job_with_its_own_hardware_and_on_clusters(page: Call, named: Named) -> None:
    step = named.values["step"]
    assert isinstance(step, dict)
    own = forms_say_the_same(page, named, "compare", "FORM", "--json")
    assert own["rows"][0]["step_s"] == step["seconds"]
    if "gpu" in str(named.plan.parent.name):
        rows = forms_say_the_same(page, named, "compare", "FORM", "--hardware", "2xH100,4xL40S", "--json")["rows"]
        assert [row["hardware"] for row in rows] == ["2xh100-sxm", "4xl40s"]
        assert rows[0]["step_s"] == step["seconds"]


def test_a_log_is_laid_beside_any_form_of_its_job(page: Call, named: Named, tmp_path: Path) -> None:
    step = named.values["step"]
    assert isinstance(step, dict)
    (tmp_path / "log.jsonl").write_text(json.dumps({"step_time": step["seconds"]}))
    result = forms_say_the_same(page, named, "explain", tmp_path / "log.jsonl", "FORM", "--json")
    assert result["is_normal"] is True
    assert result["gaps"][0]["ratio"] == pytest.approx(1.0)


@pytest.mark.parametrize("verb", PLANNING)
def test_a_page_of_a_plan_or_a_bundle_is_that_of_its_job_word_for_word(page: Call, named: Named, verb: str) -> None:
    assert len({page(verb, getattr(named, form)).out for form in FORMS}) == 1


def test_pages_of_a_cpu_host_and_of_gpus_have_the_same_headings(page: Call, folder: Path) -> None:
    jobs = (QUICKSTART, partial(folder))
    for verb, headings in (
        ("estimate", ("Memory in one step, ", "At the peak: ", "Peak of each process", "KV cache: ", "Host: ")),
        ("plan", ("Steady step by phase", "Steady step by action", "Memory: ", "Next best", "disaggregated: ")),
        (
            "explain",
            ("Bottleneck of each phase", "Memory: ", "Next best", "Rejected choices", "What if"),
        ),
        ("simulate", ("Mean step", "Utilization", "Rollouts: ")),
    ):
        for job in jobs:
            lines = page(verb, job, *["-v"] * (verb in ("estimate", "plan"))).out.splitlines()
            assert [heading for heading in headings if not any(line.startswith(heading) for line in lines)] == [], job


@pytest.mark.parametrize("form", FORMS)
def test_a_bundle_made_of_any_form_is_the_same(rlplan: Call, named: Named, form: str, tmp_path: Path) -> None:
    assert rlplan("emit", getattr(named, form), "-o", tmp_path / "bundle").exit_code == 0
    assert sorted(p.relative_to(tmp_path / "bundle") for p in (tmp_path / "bundle").rglob("*")) == sorted(
        path.relative_to(named.bundle) for path in named.bundle.rglob("*")
    )
    entry, other = (json.loads((place / "execution.json").read_text()) for place in (tmp_path / "bundle", named.bundle))
    assert entry["schedule"] == other["schedule"]


ALSO_NIGHTLY = (("cpu", "plan"), ("gpu", "job"), ("gpu", "bundle"))
REPORTED = [
    pytest.param(machine, form, marks=pytest.mark.nightly if (machine, form) in ALSO_NIGHTLY else ())
    for machine in MACHINES
    for form in FORMS
]


@pytest.mark.parametrize(("named", "form"), REPORTED, indirect=["named"])
def test_a_report_of_any_form_says_the_same(rlplan: Call, named: Named, form: str, tmp_path: Path) -> None:
    answer = rlplan("report", getattr(named, form), "-o", tmp_path / "report", "--json")
    assert answer.exit_code == 0, answer.err
    page = json.loads(answer.out)
    assert page["title"] in named.headline.replace("grpo, ", "on ").replace(", on", " on")
    assert page["tiles"][0]["value"] == "fits"
    step = named.values["step"]
    assert isinstance(step, dict)
    assert page["tiles"][1]["value"] == format_seconds(step["seconds"])


@pytest.mark.parametrize("verb", PLANNING)
def test_a_partial_job_is_planned_as_the_whole_one(page: Call, folder: Path, verb: str) -> None:
    (folder / "job.yaml").write_text(json.dumps(GPU_JOB))
    part, whole = (page(verb, path) for path in (partial(folder), folder / "job.yaml"))
    assert (part.exit_code, part.out) == (0, whole.out)


@pytest.mark.parametrize("verb", ["emit", "run"])
@pytest.mark.parametrize("form", ["job", "plan"])
def test_what_a_partial_job_lacks_is_named_with_what_to_type(
    rlplan: Call, folder: Path, verb: str, form: str, tmp_path: Path
) -> None:
    source = partial(folder)
    if form == "plan":
        assert rlplan("plan", source, "-o", tmp_path / "plan.json").exit_code == 0
        source = tmp_path / "plan.json"
    answer = rlplan(verb, source, "-o", tmp_path / "out")
    way_out = refused(answer, 2, "the job states no training data", "data.prompts=train.jsonl")
    assert not (tmp_path / "out").exists()
    keys = [word.partition("=")[0] for word in shlex.split(way_out)]
    assert keys == ["data.prompts"]
    options = [f"data.prompts={EXAMPLES / DATA['prompts']}"]
    assert "rewards" in refused(rlplan("emit", partial(folder), *options, "-o", tmp_path / "out"), 2, "rewards is []")
    whole = [*options, "rewards=[{kind: answer_matcher}]"]
    assert rlplan("emit", partial(folder), *whole, "-o", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_job_does_not_run_where_there_are_no_gpus(
    rlplan: Call, folder: Path, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    (folder / "job.yaml").write_text(json.dumps(GPU_JOB))
    sources = {"job": folder / "job.yaml", "plan": folder / "gpu" / "plan.json", "bundle": folder / "gpu" / "bundle"}
    if not sources["plan"].exists():
        assert rlplan("plan", sources["job"], "-o", sources["plan"]).exit_code == 0
        assert rlplan("emit", sources["plan"], "-o", sources["bundle"]).exit_code == 0
    refused(rlplan("run", sources[form], "-o", tmp_path / "run"), 4, "GPU")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("named", ["cpu"], indirect=True)
def test_a_dry_run_of_any_form_checks_all_and_starts_nothing(rlplan: Call, named: Named, tmp_path: Path) -> None:
    answers = [rlplan("run", getattr(named, form), "--dry-run", "-o", tmp_path / "run") for form in FORMS]
    assert [answer.exit_code for answer in answers] == [0, 0, 0]
    assert all(answer.out.startswith(named.headline) for answer in answers)
    assert len({answer.out for answer in answers}) == 1
    assert "train.jsonl: 2000 rows" in answers[0].out
    assert f"ready: a run of 40 steps would write to {tmp_path / 'run'}" in answers[0].out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", FORMS)
def test_only_a_run_is_watched(rlplan: Call, named: Named, form: str) -> None:
    refused(rlplan("watch", getattr(named, form)), 2, "rlplan run")


def test_a_cpu_job_that_lacks_its_policy_does_not_run_from_any_form(rlplan: Call, tmp_path: Path) -> None:
    """Up to where engines would start: a run looks at what it needs before it makes a folder."""
    here = tmp_path / "examples"
    shutil.copytree(EXAMPLES / "models" / "sorter", here / "models" / "sorter")
    shutil.copytree(EXAMPLES / "data", here / "data")
    job = here / "job.yaml"
    shutil.copy(QUICKSTART, job)
    assert rlplan("plan", job, "-o", here / "plan.json").exit_code == 0
    assert rlplan("emit", job, "-o", here / "bundle").exit_code == 0
    (here / "models" / "sorter" / "tokenizer.json").unlink()
    for source in (job, here / "plan.json", here / "bundle"):
        refused(rlplan("run", source, "-o", tmp_path / "run"), 2)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("form", "verb"), rotate_places(("plan", "bundle"), (*PLANNING, "emit", "run")))
def test_no_form_but_a_job_takes_an_override_and_the_way_out_works(
    rlplan: Call, page: Call, named: Named, verb: str, form: str, tmp_path: Path
) -> None:
    source = getattr(named, form)
    extra = ("-o", tmp_path / "out") if verb in ("emit", "run") else ()
    refused(rlplan(verb, source, "seed=1", *extra), 2, f"cannot change the {form} {source}")
    if form == "plan":
        way_out = refused(rlplan(verb, source, "training.zero_stage=3", *extra), 2)
        command = re.search(r"rlplan (explain \S+ --set \S+)", way_out)
        assert command is not None
        assert page(*shlex.split(command.group(1))).exit_code == 0


@pytest.mark.parametrize("verb", [*PLANNING, "emit", "run", "report"])
@pytest.mark.parametrize("kind", ["gpu_plan", None])
def test_a_plan_of_an_older_format_is_one_message_with_the_way_out(
    rlplan: Call, tmp_path: Path, verb: str, kind: str | None
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema_version": 2} | ({"kind": kind} if kind else {"job": {}})))
    extra = ("-o", tmp_path / "out") if verb in ("emit", "run") else ()
    way_out = refused(rlplan(verb, path, *extra), 2, "plan schema version is 2", "reads version 3")
    assert "rlplan plan JOB -o plan.json" in way_out


def test_a_plan_is_read_whatever_it_was_called_as_the_last_line_of_plan_says(rlplan: Call, tmp_path: Path) -> None:
    written = rlplan("plan", "examples/quickstart.yaml", "--out", str(tmp_path / "plan"))
    assert f"`rlplan explain {tmp_path / 'plan'}` explains it" in written.out + written.err
    assert rlplan("estimate", str(tmp_path / "plan")).exit_code == 0
