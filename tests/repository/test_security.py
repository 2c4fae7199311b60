"""SECURITY.md, promise by promise: each has tests, here or where the thing that keeps it is tested.

The attacks are tried through the command line; a file that hostile code would make shows that none of it ran.
"""

import ast
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlplan.emit.bundle import write_bundle
from rlplan.planner.plan import Plan
from rlplan.spec.base import Spec
from rlplan.spec.parts import rewards
from rlplan.spec.resolved import ResolvedJob
from tests.cli.conftest import Call, rlplan
from tests.docs.documentation import ROOT, list_keys, read
from tests.factories import QUICKSTART, make_plan, write_job
from tests.runtime.traps import set_traps

__all__ = ["rlplan"]

PROMISES = {
    "A job file, a profile, a plan, a bundle and a data file are data, never code.": (
        "tests/spec/files/test_yaml.py::test_what_is_not_plain_yaml_is_refused_with_line_and_column",
        "tests/emit/test_edits.py::test_a_key_that_stands_twice_in_the_plan_is_refused",
        "test_a_key_of_a_job_names_code_only_where_it_is_said",
    ),
    "Four keys name code": (
        "test_a_key_of_a_job_names_code_only_where_it_is_said",
        "test_planning_never_imports_what_a_job_names",
        "tests/spec/test_declaration.py::test_a_declaration_of_one_s_own_is_read_without_running_its_file",
    ),
    "A bundle adds nothing to its plan.": (
        "test_a_bundle_that_would_run_code_is_refused_before_anything_starts",
        "tests/emit/test_edits.py::test_an_edit_is_refused_with_both_values",
        "tests/emit/test_edits.py::test_a_link_is_refused_when_it_is_read_and_never_written_through",
        "tests/emit/test_edits.py::test_a_changed_launch_script_is_refused_at_its_line",
        "tests/runtime/processes/test_own_host.py::test_a_run_from_inside_a_bundle_full_of_traps_springs_none_and_listens_nowhere_else",
    ),
    "What is read is bounded.": (
        "tests/test_reading.py::test_what_may_have_no_end_is_refused_before_a_byte_is_read",
        "tests/test_reading.py::test_a_file_is_read_up_to_its_limit_and_no_further",
        "tests/trust/test_pipes.py::test_a_pipe_in_place_of_a_file_ends_in_a_message_or_is_left_alone",
        "tests/trust/test_sizes.py::test_a_small_table_that_unpacks_to_gigabytes_is_refused",
        "tests/trust/test_sizes.py::test_json_of_too_many_values_is_refused_by_every_reader_of_it",
        "tests/trust/test_fuzz.py::test_no_reader_breaks_on_some_hostile_files",
        "tests/runtime/data/test_model_text.py::test_a_tokenizer_that_takes_gigabytes_is_stopped_and_a_run_does_not_begin",
        "tests/runtime/data/test_model_text.py::test_a_hostile_template_is_one_message",
        "test_no_untrusted_file_is_opened_in_another_way",
    ),
    "What is read is not obeyed by a terminal.": (
        "tests/test_printable.py::test_what_would_move_colour_hide_or_reorder_is_written_out",
        "tests/trust/test_printable_output.py::test_untrusted_text_is_printed_without_its_control_characters",
    ),
    "Nothing is imported from the current folder": (
        "tests/runtime/processes/test_own_host.py::test_no_process_of_ours_is_started_with_the_current_folder_on_its_path",
        "tests/runtime/processes/test_own_host.py::test_a_process_beside_the_run_does_not_look_into_the_current_folder",
        "tests/runtime/processes/test_own_host.py::test_neither_ray_s_workers_nor_what_they_start_look_into_the_current_folder",
        "tests/runtime/processes/test_own_host.py::test_a_run_from_inside_a_bundle_full_of_traps_springs_none_and_listens_nowhere_else",
    ),
    "Model text is data": (
        "tests/runtime/sandbox/test_attacks.py::test_nothing_escapes",
        "tests/runtime/sandbox/test_choice.py::test_without_a_sandbox_the_run_is_refused",
    ),
    "Weights are safetensors.": (
        "tests/runtime/models/test_start_checkpoint.py::test_python_in_a_model_s_folder_is_not_imported",
        "tests/runtime/driver/test_preflight.py::test_a_policy_in_parts_that_would_be_unpickled_is_refused",
        "tests/emit/test_engines.py::test_the_engine_is_told_to_load_safetensors_and_no_code",
    ),
    "The network is not needed.": (
        "test_planning_and_emitting_open_no_connection",
        "tests/runtime/processes/test_own_host.py::test_every_port_of_a_run_s_own_ray_is_on_the_loopback",
        "tests/runtime/processes/test_own_host.py::test_ray_s_metrics_have_no_port",
        "tests/runtime/processes/test_own_host.py::test_a_run_from_inside_a_bundle_full_of_traps_springs_none_and_listens_nowhere_else",
    ),
    "Two keys name servers": (
        "test_planning_never_asks_the_servers_that_a_job_names",
        "tests/runtime/environments/test_remote.py::test_an_environment_behind_http_keeps_a_session_for_each_rollout",
        "tests/runtime/environments/test_remote.py::test_a_server_that_says_what_is_no_answer_fails_that_rollout_by_name",
        "tests/runtime/environments/test_remote.py::test_addresses_that_could_be_read_on_their_way_or_hold_a_secret_are_refused",
        "tests/runtime/processes/test_http_exchange.py::test_answers_in_drops_end_at_the_deadline",
        "tests/runtime/environments/test_mcp_tools.py::test_every_schema_is_evaluated_in_time",
    ),
    "An agent reaches its own rollout alone.": (
        "tests/runtime/gateway/test_gateway.py::test_bytes_that_are_no_request_are_refused_in_openai_s_format",
        "tests/runtime/gateway/test_gateway.py::test_a_client_that_leaves_is_not_recorded_and_its_rollout_ends_when_the_engine_has",
        "tests/runtime/gateway/test_agent_rollouts.py::test_agents_that_fail_hang_or_leave_something_behind_end_their_rollouts_and_nothing_is_left",
    ),
    "`rlplan ui` is for one person on one machine.": (
        "tests/cli/ui/test_ui.py::test_nothing_is_answered_without_the_token_or_under_another_name",
        "tests/cli/ui/test_ui.py::test_a_browser_is_opened_without_the_token_on_its_command_line",
        "tests/cli/ui/test_ui.py::test_what_is_typed_comes_back_as_text",
        "tests/cli/ui/test_ui.py::test_requests_in_drops_are_ended_and_others_are_answered",
    ),
    "Other users of the machine": (),
    "The installed packages": (
        "tests/repository/test_packaging.py::test_every_line_of_the_lock_is_an_exact_pin_with_a_hash",
        "tests/repository/test_gpu_lock.py::test_every_line_is_an_exact_pin_with_a_hash",
        "tests/repository/test_packaging.py::test_what_a_wheel_asks_for_has_an_upper_bound",
        "tests/repository/test_ecosystem_files.py::test_a_release_is_audited_and_signed_with_its_bill_of_materials",
    ),
}
"""Promises of SECURITY.md, and the tests that hold it. Other users are not defended against."""


def test_every_promise_is_tested() -> None:
    trusted = read(ROOT / "SECURITY.md").partition("## Out of scope")[0]
    assert re.findall(r"(?m)^\*\*([^*]+)\*\*", trusted) == list(PROMISES)
    for test in (test for tests in PROMISES.values() for test in tests):
        file, _, name = test.rpartition("::")
        tree = ast.parse(read(ROOT / file) if file else Path(__file__).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


# ---------------------------------------------------------------------------------------------- what names code

CODE = {
    "rewards": "rewards=[{{kind: function, path: '{file}:answer'}}]",
    "rollout.environment.path": "rollout.environment.path={file}:answer",
    "rollout.environment.agent": "rollout.environment.agent={file}:answer",
    "rollout.environment.mcp": "rollout.environment.mcp=['{file}']",
    "algorithm.path": "algorithm={{path: '{file}:MINE', learning_rate: 1.0e-5}}",
}
OWN = """
open({sprung!r}, "w").write("imported")
def answer(completions, **columns):
    return [0.0]
MINE = Algorithm(name="mine", source="", advantage="group_mean", loss="clipped_ratio")
"""


def test_a_key_of_a_job_names_code_only_where_it_is_said() -> None:
    paths = {key for key in list_keys(ResolvedJob) if key.rpartition(".")[2] in ("path", "module", "function", "cls")}
    folders = {
        "policy.path",
        "training.lora.path",
        *(f"roles.{role}.path" for role in ("reference", "reward", "value", "teacher")),
    }
    assert paths - folders == {"algorithm.path", "rollout.environment.path"}
    kinds = [kind for kind in vars(rewards).values() if isinstance(kind, type) and issubclass(kind, Spec)]
    assert [kind for kind in kinds if "path" in kind.model_fields] == [rewards.FunctionSpec]


@pytest.mark.parametrize("key", CODE)
def test_planning_never_imports_what_a_job_names(rlplan: Call, tmp_path: Path, key: str) -> None:
    job, file, sprung = write_job(tmp_path), tmp_path / "own.py", tmp_path / "sprung"
    file.write_text(OWN.format(sprung=str(sprung)))
    override = CODE[key].format(file=file)
    for command in (
        ("estimate", job),
        ("plan", job, "-o", tmp_path / "plan.json"),
        ("emit", job, "-o", tmp_path / "b"),
    ):
        answer = rlplan(command[0], command[1], override, *command[2:])
        assert answer.exit_code == 0, answer.err
    assert rlplan("emit", tmp_path / "plan.json", "-o", tmp_path / "b").exit_code == 0
    assert not sprung.exists()


def test_planning_never_asks_the_servers_that_a_job_names(rlplan: Call, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        place = f"http://127.0.0.1:{listener.getsockname()[1]}/games"
        for key in (f"url={place}", f"mcp=['{place}']"):
            answer = rlplan("plan", job, f"rollout.environment.{key}", "-o", tmp_path / "plan.json")
            assert answer.exit_code == 0, answer.err
            assert place in (tmp_path / "plan.json").read_text()
        with pytest.raises(BlockingIOError):
            listener.accept()


# ---------------------------------------------------------------------------------------------- what is read

OPENED_OTHERWISE = {
    "rlplan/accuracy/files/logs.py": "vllm_log.yaml, which comes with rlplan",
    "rlplan/accuracy/named_models.py": "comes with rlplan",
    "rlplan/accuracy/without_effect.py": "without_effect.csv, which comes with rlplan",
    "rlplan/emit/ray.py": "ray.toml, which comes with rlplan",
    "rlplan/containment.py": "the kernel's, and the null device",
    "rlplan/foreign/logs/read.py": "names.yaml, which comes with rlplan",
    "rlplan/foreign/table.py": "comes with rlplan",
    "rlplan/foreign/tracebacks/read.py": "frames.yaml, which comes with rlplan",
    "rlplan/frameworks/profile.py": "comes with rlplan",
    "rlplan/report/html.py": "comes with rlplan",
    "rlplan/report/style.py": "comes with rlplan",
    "rlplan/spec/algorithms/__init__.py": "comes with rlplan",
    "rlplan/spec/models/families/family.py": "comes with rlplan",
    "rlplan/spec/models/families/towers.py": "comes with rlplan",
    "rlplan/spec/hardware/catalogue.py": "profiles, which were read through read_yaml before",
    "rlplan/memory/model/block_families.py": "comes with rlplan",
    "rlplan/memory/model/quantization.py": "comes with rlplan",
    "rlplan/spec/models/names.py": "comes with rlplan",
    "rlplan/trace.py": "is written",
    "cli/rlplan_cli/app.py": "/dev/null",
    "cli/rlplan_cli/pages.py": "comes with rlplan",
    "cli/rlplan_cli/commands/running/report.py": "was written by this process",
    "cli/rlplan_cli/commands/running/run.py": "was written by this process",
}
"""Files of ours that open files without rlplan/reading.py, and what those are."""


def test_no_untrusted_file_is_opened_in_another_way() -> None:
    opens = re.compile(r"(?<!def )\b(open|read_text|read_bytes|safe_open|fdopen)\(")
    openers = set()
    for path in [*(ROOT / "rlplan").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        if name.startswith("rlplan/runtime/") and not name.startswith("rlplan/runtime/data/"):
            continue  # files of a run's own, and the kernel's
        text = path.read_text("utf-8")
        guarded = set(re.findall(r"\b(read_text|read_bytes)\b", "".join(re.findall(r"from rlplan.reading .*", text))))
        calls = [match for match in opens.finditer(text) if text[match.start() - 1] == "." or match[1] not in guarded]
        if calls and name != "rlplan/reading.py":
            openers.add(name)
    assert openers == set(OPENED_OTHERWISE)


# ---------------------------------------------------------------------------------------------- bundles


def into_ray(data: dict[str, Any], **environment: str) -> None:
    for worker in data["workers"]:
        worker["environment"] |= environment


ATTACKS: dict[str, tuple[str, Callable[[dict[str, Any], Path], None], str]] = {
    "a search path with a sitecustomize.py": (
        "ray.json",
        lambda data, folder: into_ray(data, PYTHONPATH=str(folder)),
        "PYTHONPATH",
    ),
    "a library that is loaded first": (
        "ray.json",
        lambda data, folder: into_ray(data, LD_PRELOAD=str(folder / "evil.so")),
        "LD_PRELOAD",
    ),
    "Python of the model's folder": (
        "vllm/policy.json",
        lambda data, folder: data.update(trust_remote_code=True),
        "trust_remote_code",
    ),
    "a class for the engine's workers": (
        "vllm/policy.json",
        lambda data, folder: data.update(worker_extension_cls="sitecustomize.Extension"),
        "worker_extension_cls",
    ),
    "a class for the engine's executor": (
        "vllm/policy.json",
        lambda data, folder: data.update(distributed_executor_backend="sitecustomize.Executor"),
        "distributed_executor_backend",
    ),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bundle_that_would_run_code_is_refused_before_anything_starts(
    rlplan: Call, plan: Plan, tmp_path: Path, name: str
) -> None:
    bundle, out = tmp_path / "bundle", tmp_path / "run"
    write_bundle(plan, bundle)
    sprung = set_traps(bundle)
    file, change, key = ATTACKS[name]
    data = json.loads((bundle / file).read_text())
    change(data, bundle)
    (bundle / file).write_text(json.dumps(data))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    answer = rlplan("run", bundle, "--out", out)
    assert answer.exit_code == 2, answer.err
    assert key in answer.err
    assert "the plan gives" in answer.err
    assert f"rlplan emit {bundle}/plan.json -o {bundle}" in answer.err
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not out.exists()
    assert not sprung.exists()


# ---------------------------------------------------------------------------------------------- the network


def test_planning_and_emitting_open_no_connection(
    rlplan: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def refuse(*arguments: Any, **more: Any) -> Any:
        opened.append(arguments)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "bind", "listen"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert rlplan("estimate", QUICKSTART).exit_code == 0
    assert rlplan("plan", QUICKSTART, "-o", tmp_path / "plan.json").exit_code == 0
    assert rlplan("emit", tmp_path / "plan.json", "-o", tmp_path / "bundle").exit_code == 0
    assert rlplan("report", tmp_path / "plan.json", "--out", tmp_path / "report").exit_code == 0
    assert opened == []
