"""Promises of a run, checked on real runs of vLLM, DeepSpeed and Ray."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlplan.memory.ledger import LedgerRow
from rlplan.trace import MemorySample
from rlplan.vocabulary import PERSISTENT_KINDS, MemoryKind
from tests.runtime.conftest import OTHER_LAYOUT, QUICKSTART_STEPS, FinishedRun, Runner, finish, start
from tests.runtime.runs.beside_the_plan import process_peaks

pytestmark = pytest.mark.engine

ROUNDING = 1e-4
"""fp32 log-probs of two implementations agree this well; a policy one optimizer step away does not."""


def test_the_quickstart_learns_to_sort(quickstart_run: FinishedRun) -> None:
    assert quickstart_run.exit_code == 0, quickstart_run.stderr
    accuracy = {row["step"]: row["evaluate/greedy_accuracy"] for row in quickstart_run.metrics if _is_evaluated(row)}
    assert accuracy[QUICKSTART_STEPS] - accuracy[0] >= 0.5, accuracy


def test_every_rollout_uses_the_weights_of_the_step_before(quickstart_run: FinishedRun) -> None:
    differences = [row["sync/logprob_difference_max"] for row in quickstart_run.metrics if row["step"] > 0]
    assert len(differences) == QUICKSTART_STEPS
    assert max(differences) < ROUNDING


@pytest.mark.nightly
def test_a_skipped_sync_shows_in_the_next_step_and_is_gone_after_the_next_sync(other_layout_run: FinishedRun) -> None:
    assert other_layout_run.exit_code == 0, other_layout_run.stderr
    trained = [row for row in other_layout_run.metrics if row["step"] > 0]
    differences = {row["step"]: row["sync/logprob_difference_max"] for row in trained}
    assert differences[2] > 100 * ROUNDING, differences
    assert differences[1] < ROUNDING
    assert differences[3] < ROUNDING


def test_a_second_mini_batch_moves_the_ratio(colocated_run: FinishedRun) -> None:
    assert all(row["policy/ratio_max"] > 1.001 for row in colocated_run.metrics if row["step"] > 0)


MEMORY_BOUND_RUN = pytest.param("memory_bound_run", marks=pytest.mark.nightly)
OTHER_LAYOUT_RUN = pytest.param("other_layout_run", marks=pytest.mark.nightly)


@pytest.mark.parametrize("name", ["quickstart_run", MEMORY_BOUND_RUN, OTHER_LAYOUT_RUN, "colocated_run"])
def test_persistent_components_are_predicted_to_the_byte(name: str, request: pytest.FixtureRequest) -> None:
    run: FinishedRun = request.getfixturevalue(name)
    compared = set()
    for sample, row in _join_rows(run):
        if sample.kind in PERSISTENT_KINDS:
            predicted = row.loaded_bytes if sample.statistic == "loaded" else row.resident_bytes
            assert sample.num_bytes == predicted, (sample, row)
            compared.add((sample.process.split("/")[0], sample.kind, sample.statistic))
    assert compared == {
        *(("policy_trainer", kind, "resident") for kind in ("weights", "gradients", "master_weights", "optimizer")),
        ("scorer", "weights", "resident"),
        ("rollout_engine", "weights", "loaded"),
        ("rollout_engine", "weights", "resident"),
        ("rollout_engine", "kv_cache", "resident"),
    }


@pytest.mark.parametrize("name", ["quickstart_run", MEMORY_BOUND_RUN])
def test_packed_weights_are_predicted_within_five_percent(name: str, request: pytest.FixtureRequest) -> None:
    run: FinishedRun = request.getfixturevalue(name)
    errors = [row.resident_bytes / s.num_bytes - 1 for s, row in _join_rows(run) if s.kind == MemoryKind.PACKED_WEIGHTS]
    assert errors
    assert max(abs(error) for error in errors) <= 0.05


@pytest.mark.parametrize("name", ["quickstart_run", MEMORY_BOUND_RUN, OTHER_LAYOUT_RUN, "colocated_run"])
def test_no_process_peak_is_above_its_prediction_or_far_below(name: str, request: pytest.FixtureRequest) -> None:
    run: FinishedRun = request.getfixturevalue(name)
    for process, (predicted, measured) in process_peaks(run).items():
        assert measured <= predicted <= measured * 1.15, (process, predicted, measured)


@pytest.mark.nightly
def test_without_the_import_baseline_the_peaks_of_the_memory_bound_job_still_fit(memory_bound_run: FinishedRun) -> None:
    """The prediction less its own process row, against the peak less what was measured before any model was there."""
    baselines = {s.process: s.num_bytes for s in memory_bound_run.trace.samples if s.kind == MemoryKind.PROCESS}
    assert len(baselines) == 4
    for process, (predicted, measured) in process_peaks(memory_bound_run).items():
        if process not in baselines:
            continue
        peak = memory_bound_run.plan.ledger.process_peak(process)
        modelled = predicted - sum(size for _, _, kind, size in peak.rows if kind is MemoryKind.PROCESS)
        net = measured - baselines[process]
        assert modelled >= measured / 2, f"{process}: the models are less than half of the peak"
        assert net <= modelled <= net * 1.15, (process, modelled, net)


def test_the_prediction_was_written_before_the_run_and_without_it(quickstart_run: FinishedRun) -> None:
    """The ledger in the run folder is the bundle's, which was written before any process started."""
    assert quickstart_run.plan.ledger == _plan_of_bundle(quickstart_run).ledger
    started = min(span.start_s for span in quickstart_run.trace.spans)
    assert started >= 0
    bundle = (quickstart_run.folder / "bundle" / "plan.json").stat().st_mtime
    assert bundle < (quickstart_run.folder / "trace.jsonl").stat().st_mtime


def test_a_job_is_run_from_the_bundle_that_emit_writes_of_it(
    colocated_run: FinishedRun, colocated_job: tuple[str, ...], tmp_path: Path
) -> None:
    """A bundle runs the same as its job: tests/runtime/driver/test_rehearsal.py runs one.

    Paths in a bundle are relative to it: both lie equally deep under pytest's folder.
    """
    bundle = tmp_path / "run" / "bundle"
    emitted = finish(start("emit", *colocated_job, "-o", str(bundle)), tmp_path)
    assert emitted.exit_code == 0, emitted.stderr
    assert _read_files(bundle) == _read_files(colocated_run.folder / "bundle")


@pytest.mark.nightly
def test_a_bundle_gives_the_same_learning_bit_for_bit_as_the_job(
    run_job: Runner, other_layout_run: FinishedRun, tmp_path: Path
) -> None:
    """Two seeded runs agree, and a bundle runs what the job would have run."""
    bundle = str(tmp_path / "bundle")
    emitted = finish(start("emit", "examples/quickstart.yaml", *OTHER_LAYOUT, "-o", bundle), tmp_path)
    assert emitted.exit_code == 0, emitted.stderr
    of_bundle, of_job = run_job(bundle), other_layout_run
    assert of_bundle.exit_code == of_job.exit_code == 0, of_bundle.stderr + of_job.stderr
    assert of_bundle.metrics, "there is something to compare"
    assert (of_bundle.folder / "metrics.jsonl").read_bytes() == (of_job.folder / "metrics.jsonl").read_bytes()
    assert _weights(of_bundle) == _weights(of_job)


@pytest.mark.nightly
def test_another_family_with_an_untied_head_and_random_weights_runs(run_job: Runner, tmp_path: Path) -> None:
    """Qwen2 with biases, its own head and no weights on disk: exact bytes and agreeing log-probs here too."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 200,
        "vocab_size": 70,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Path(__file__).parents[3] / "examples" / "models" / "sorter" / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    run = run_job(
        "examples/quickstart.yaml",
        f"policy.path={tmp_path}",
        "policy.init=random",
        "workload.num_steps=2",
        "workload.mini_batch_size=128",
        "algorithm.learning_rate=1e-3",
    )
    assert run.exit_code == 0, run.stderr
    assert all(row["sync/logprob_difference_max"] < ROUNDING for row in run.metrics if row["step"] > 0)
    for sample, row in _join_rows(run):
        if sample.kind in PERSISTENT_KINDS:
            predicted = row.loaded_bytes if sample.statistic == "loaded" else row.resident_bytes
            assert sample.num_bytes == predicted, sample


def test_the_report_of_the_quickstart_is_written_by_the_run(quickstart_run: FinishedRun) -> None:
    report = json.loads((quickstart_run.folder / "report" / "report.json").read_text())
    assert report["learning"][0]["evaluations"][0]["change"] >= 0.5
    assert all(kind["is_exact"] for kind in report["memory"]["persistent_kinds"])
    assert "data-chart" in (quickstart_run.folder / "report" / "index.html").read_text()


def test_the_trained_policy_is_left_in_hugging_face_layout(quickstart_run: FinishedRun) -> None:
    from safetensors import safe_open

    policy = quickstart_run.folder / "policy"
    model = quickstart_run.plan.job.load_model()
    with safe_open(policy / "model.safetensors", framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {parameter.name: parameter.shape for parameter in model.parameters}
    assert (policy / "tokenizer.json").is_file()
    assert json.loads((policy / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def _is_evaluated(row: dict[str, float]) -> bool:
    return "evaluate/greedy_accuracy" in row


def _run_phase(step: int) -> str:
    return {0: "start", 1: "first", -1: "finish"}.get(step, "steady")


def _join_rows(run: FinishedRun) -> Iterator[tuple[MemorySample, LedgerRow]]:
    """Every measured component with the ledger row of its action, process, role and kind; both must exist."""
    assert run.exit_code == 0, run.stderr
    rows = {(row.run_phase, row.action_id, row.process, row.role, row.kind): row for row in run.plan.ledger.rows}
    measured = set()
    for sample in run.trace.samples:
        if sample.kind in ("total", MemoryKind.PROCESS):
            continue
        key = (_run_phase(sample.step), sample.action_id, sample.process, sample.role, sample.kind)
        if key in rows:
            measured.add(key)
            yield sample, rows[key]
        else:
            assert sample.num_bytes == 0, f"measured, but not predicted: {sample}"
    missing = {key for key, row in rows.items() if row.kind in PERSISTENT_KINDS and row.resident_bytes} - measured
    skipped = ("first", "sync_weights") if run.plan.job.controls.skip_sync_after_step == 1 else None
    missing = {key for key in missing if key[1] != "evaluate" and key[:2] != skipped}
    assert not missing, "predicted, but never measured"


def _plan_of_bundle(run: FinishedRun):  # type: ignore[no-untyped-def]
    from rlplan.planner.plan import read_plan

    return read_plan(run.folder / "bundle" / "plan.json")


def _read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _weights(run: FinishedRun) -> bytes:
    return (run.folder / "policy" / "model.safetensors").read_bytes()
