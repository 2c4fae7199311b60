"""A job that names its model by hub id runs: from the hub's cache, or fetched whole once its plan is known to run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from rlplan_cli.sources import plan_with_models

from rlplan.planner.plan import Plan
from rlplan.runtime.checkpoints.identity import describe_identity
from rlplan.runtime.data.prompt_sets import load_prompts
from rlplan.runtime.driver import preflight
from rlplan.spec.models.headers import read_checkpoint
from tests.cli.conftest import Call, rlplan
from tests.factories import EXAMPLES, QUICKSTART
from tests.hub_server import TEMPLATE, WHOLE, Hub, serve_hub
from tests.repository.at_night import mark_nightly

__all__ = ["rlplan"]

BUNDLED = "Qwen/Qwen2.5-0.5B"
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One that the hub's library and ours ask, with a cache of the test's own."""
    with serve_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", served.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        yield served


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The quickstart beside its own data, its policy named by hub id."""
    text, place = QUICKSTART.read_text(), str(EXAMPLES / "data")
    assert "models/sorter" in text
    path = tmp_path / "job.yaml"
    path.write_text(text.replace("models/sorter", WHOLE).replace("data/", f"{place}/"))
    return path


def make_ready(job: Path) -> Plan:
    """The plan of a job whose models are ready, as a run prepares them before it starts anything."""
    plan = plan_with_models("run", job, (), None)
    preflight.check_plan(plan)
    load_prompts(plan.job)
    return plan


def test_a_hub_id_is_fetched_whole_once_and_then_read_from_the_cache(
    hub: Hub, job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = make_ready(job)
    folder, errors = Path(plan.job.policy.path), capfd.readouterr().err
    assert plan.model_name == WHOLE
    assert f"downloading {WHOLE}, 3." in errors
    assert f"into {job.parent}/hf/hub" in errors
    assert len(read_checkpoint(folder)) == len(read_checkpoint(EXAMPLES / "models" / "sorter"))
    assert (folder / "chat_template.jinja").read_bytes() == TEMPLATE
    assert not {"pytorch_model.bin", "modeling.py", "original"} & {path.name for path in folder.iterdir()}
    count = len(hub.requests)
    assert make_ready(job).job.policy.path == str(folder)
    assert capfd.readouterr().err == ""
    assert len(hub.requests) == count


@pytest.mark.nightly
def test_what_hf_download_fetched_is_used_without_a_network(
    hub: Hub, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = snapshot_download(WHOLE)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    assert make_ready(job).job.policy.path == folder


def test_a_download_that_was_cut_off_is_not_taken_for_the_model_and_goes_on(hub: Hub, job: Path) -> None:
    part = Path(snapshot_download(WHOLE)) / "model-00002-of-00002.safetensors"
    part.resolve().unlink()
    part.unlink()
    count = len(hub.requests)
    make_ready(job)
    assert part.is_file()
    assert not [path for path, _ in hub.requests[count:] if "00001-of" in path]


@pytest.mark.parametrize("reason", mark_nightly(["Connection refused", "offline mode is enabled"], but=1))
def test_without_a_network_a_run_names_the_command_that_helps(
    hub: Hub, job: Path, rlplan: Call, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason.startswith("offline"):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    answer = rlplan("run", job, f"policy.path={BUNDLED}", "hardware.memory=64GiB")
    assert answer.exit_code == 4, answer.err
    what, where, rule, way_out = answer.err.strip().splitlines()[-4:]
    assert what.startswith(f"error: model '{BUNDLED}' is not on this machine, and the hub cannot be reached: ")
    assert reason in what
    assert where == f"  where: {job}: {BUNDLED}"
    assert f"models/{BUNDLED} beside the job file" in rule
    assert way_out.startswith(f"  way out: with a network: hf download {BUNDLED}; or ")
    assert hub.requests == []


def test_an_id_that_the_hub_does_not_have_is_the_job_s_fault(hub: Hub, job: Path, rlplan: Call) -> None:
    answer = rlplan("run", job, f"policy.path={BUNDLED}", "hardware.memory=64GiB")
    assert answer.exit_code == 2, answer.err
    assert f"error: the hub does not provide the model of '{BUNDLED}' (HTTP 404)" in answer.err


def test_a_job_that_cannot_run_here_fetches_nothing(hub: Hub, job: Path, rlplan: Call) -> None:
    answer = rlplan("run", job, f"policy.path={BUNDLED}", "hardware.memory=1GiB")
    assert answer.exit_code == 1, answer.err
    assert hub.requests == []


def test_a_model_beside_the_job_file_comes_before_the_cache(hub: Hub, job: Path) -> None:
    place = job.parent / "models" / BUNDLED
    place.parent.mkdir(parents=True)
    place.symlink_to(EXAMPLES / "models" / "sorter")
    job.write_text(job.read_text().replace(WHOLE, BUNDLED))
    plan = make_ready(job)
    assert (plan.model_name, plan.job.policy.path) == (BUNDLED, str(place))
    assert hub.requests == []


# --------------------------------------------------------------------------------------------------------- data sets


def keep_in_the_cache(name: str, **files: str) -> Path:
    """A data set as `hf download --repo-type dataset` leaves it."""
    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    commit = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    for place, text in files.items():
        path = commit / place.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".jsonl").write_text(text)
    return commit


ROWS = "".join(f'{{"id": "{n}", "prompt": "Sort: {n}", "answer": "{n}"}}\n' for n in range(10, 90))


def test_data_are_named_by_hub_id_and_read_from_the_cache_without_a_network(
    hub: Hub, job: Path, tmp_path: Path
) -> None:
    keep_in_the_cache("someone/sums", main__train=ROWS, main__test=ROWS.replace("Sort: ", "Sort:"))
    words = ("data.prompts=someone/sums:main/train.jsonl", "data.heldout=someone/sums:main/test.jsonl")
    overrides = (*words, f"policy.path={EXAMPLES / 'models' / 'sorter'}")
    plan = plan_with_models("run", job, overrides, None)
    assert plan.job.needed_data.prompts == "hf://datasets/someone/sums/main/train.jsonl"
    prompts = load_prompts(plan.job)
    assert (len(prompts.train), len(prompts.heldout)) == (80, 80)
    assert plan.job.make_relative(tmp_path).needed_data == plan.job.needed_data
    assert "data.prompts" in describe_identity(plan.job)
    assert hub.requests == []


def test_data_that_are_not_there_name_the_command_that_fetches_them(hub: Hub, job: Path, rlplan: Call) -> None:
    policy = f"policy.path={EXAMPLES / 'models' / 'sorter'}"
    answer = rlplan("run", job, policy, "data.prompts=someone/sums", "--dry-run")
    assert answer.exit_code == 4, answer.err
    assert "data set 'someone/sums' is not on this machine" in answer.err
    assert "hf download --repo-type dataset someone/sums" in answer.err
    assert hub.requests == []
    answer = rlplan("run", job, policy, "data.prompts=someone/sums")
    assert answer.exit_code == 2, answer.err
    assert "the hub does not provide the data set of 'someone/sums'" in answer.err
    keep_in_the_cache("someone/sums", main__train=ROWS)
    answer = rlplan("run", job, policy, "data.prompts=someone/sums:other", "--dry-run")
    assert "data set 'someone/sums' has no 'other'" in answer.err
    assert rlplan("plan", job, policy, "data.prompts=someone/sums").exit_code == 0
