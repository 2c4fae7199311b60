"""The ledger of a whole job, row by row worked by hand, and properties that hold for any job.

The job: 2 devices, 16 rollouts a step in one mini-batch, micro-batches of 4, 8 + 12 tokens. The model of the factories:
P=2148, h=8, L=2, I=20, V=70. A rank's share is 8 rollouts in 2 micro-batches: T=80 tokens, n=48 response tokens.
"""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplan.dataflow.build import build_schedule
from rlplan.dataflow.schedule import Action
from rlplan.memory.ledger import LedgerRow, MemoryLedger, RunPhase
from rlplan.memory.predict import Forecast, Process, predict_ledger
from rlplan.memory.roles.ledger import predict_cpu_ledger
from rlplan.planner.resolve import read_choice
from rlplan.units import MIB, ceil_div
from rlplan.vocabulary import MemoryKind, Placement, Role
from tests.factories import EXAMPLES, make_job, make_model, make_plan, make_profile
from tests.repository.at_night import examples

ENGINE, SCORER = "rollout_engine/0", "scorer/reference/0"


def make_ledger(
    placement: Placement = Placement.HYBRID, model: dict[str, Any] | None = None, **overrides: Any
) -> MemoryLedger:
    job = make_job(**overrides)
    schedule = build_schedule(job, read_choice(job, placement, 2))
    return predict_cpu_ledger(job, make_model(**(model or {})), make_profile(), schedule)


LEDGER = make_ledger()


def find_bytes(process: str, run_phase: str, action: str, what: str = "resident_bytes") -> dict[str, int]:
    """Bytes by kind, without the process's own imports and slack."""
    rows = [r for r in LEDGER.rows if (r.process, r.run_phase, r.action_id) == (process, run_phase, action)]
    own = (MemoryKind.PROCESS, MemoryKind.FRAGMENTATION)
    return {r.kind.value: getattr(r, what) for r in rows if r.kind not in own and getattr(r, what)}


def test_a_trainer_starts_with_weights_and_master_weights_and_a_second_copy_for_a_moment() -> None:
    # 2148*4 and half of it; while DeepSpeed flattens, the loaded parameters stand beside: 8592, of which the master
    # partition's 4296 is not there yet
    weights = {"weights": 8592, "master_weights": 4296}
    assert find_bytes("policy_trainer/0", "start", "start_trainer") == weights
    assert find_bytes("policy_trainer/0", "start", "start_trainer", "peak_bytes") == weights | {"comm_buffers": 4296}


def test_from_the_first_sync_on_the_first_rank_has_the_staging_arena() -> None:
    # all of the model in one bucket: 2240 + 2*3328 + 64
    assert find_bytes("policy_trainer/0", "start", "sync_weights")["sync_staging"] == 8960
    assert "sync_staging" not in find_bytes("policy_trainer/1", "start", "sync_weights")


def test_gradients_stay_between_the_passes_and_the_step() -> None:
    weights = {"weights": 8592, "master_weights": 4296, "sync_staging": 8960}
    assert find_bytes("policy_trainer/0", "first", "train_forward_backward") == weights | {"gradients": 1174 * 4}
    assert find_bytes("policy_trainer/1", "first", "train_forward_backward")["gradients"] == 1134 * 4
    assert "gradients" not in find_bytes("policy_trainer/0", "first", "optimizer_step")


def test_adam_appears_in_the_first_optimizer_step_and_stays() -> None:
    adam = 2 * 1074 * 4 + 4
    assert "optimizer" not in find_bytes("policy_trainer/0", "first", "train_forward_backward")
    for run_phase, action in (
        ("first", "optimizer_step"),
        ("first", "sync_weights"),
        ("steady", "train_forward_backward"),
        ("steady", "optimizer_step"),
        ("finish", "checkpoint"),
    ):
        assert find_bytes("policy_trainer/0", run_phase, action)["optimizer"] == adam


def test_with_several_mini_batches_adam_is_there_from_the_second_on() -> None:
    ledger = make_ledger(**{"workload.mini_batch_size": 4})
    actions = [
        row.action_id
        for row in ledger.rows
        if (row.process, row.run_phase, row.kind) == ("policy_trainer/0", "first", "optimizer")
    ]
    assert "train_forward_backward/0" not in actions
    assert {"optimizer_step/0", "train_forward_backward/1", "optimizer_step/3", "sync_weights"} <= set(actions)


def test_an_optimizer_step_peaks_while_flattening_or_while_gathering() -> None:
    # flattening: gradients 4696 and a flat copy of the partition 4296, before Adam's 8596 exist in the first step;
    # gathering: all partitions once more, 8592. First: max(8992, 8592 + 8596), so gathering; later max(8992, 8592)
    first = find_bytes("policy_trainer/0", "first", "optimizer_step", "peak_bytes")
    steady = find_bytes("policy_trainer/0", "steady", "optimizer_step", "peak_bytes")
    assert (first.get("gradients", 0), first["comm_buffers"]) == (0, 8592)
    assert (steady["gradients"], steady["comm_buffers"]) == (4696, 4296)


def test_a_single_rank_gathers_nothing_and_steps_on_a_flat_copy() -> None:
    # gradients 8592 and their flat copy 8592 before Adam's 17,188 exist; then the flat copy beside Adam
    ledger = make_ledger(**{"hardware.num_devices": 1})
    steps: dict[str, int] = defaultdict(int)
    for row in ledger.rows:
        if row.action_id == "optimizer_step" and row.kind.value in ("gradients", "comm_buffers"):
            steps[row.run_phase] += row.peak_bytes
    assert steps == {"first": 8592, "steady": 2 * 8592}


def test_the_first_rank_alone_copies_the_weights_to_write_them() -> None:
    assert find_bytes("policy_trainer/0", "finish", "checkpoint", "peak_bytes")["weights"] == 2 * 8592
    assert find_bytes("policy_trainer/1", "finish", "checkpoint") == {}


def test_only_the_first_optimizer_step_of_all_finds_adam_missing() -> None:
    ledger = make_ledger(**{"workload.mini_batch_size": 4})
    steps: dict[str, int] = defaultdict(int)
    for row in ledger.rows:
        is_late = (row.process, row.run_phase) == ("policy_trainer/0", "first") and not row.action_id.endswith("/0")
        if is_late and row.action_id.startswith("optimizer_step") and row.kind.value in ("gradients", "comm_buffers"):
            steps[row.action_id] += row.peak_bytes
    # the first gathers; each later one flattens 4696 + 4296 as in every later step
    assert steps == {f"optimizer_step/{index}": 8992 for index in (1, 2, 3)}


def test_the_engine_loads_every_parameter_and_then_packs_them() -> None:
    # vocabulary padded to 128: 2612 elements; of them 1076 stay; packs and blocks as in test_params
    assert find_bytes(ENGINE, "start", "start_engine", "loaded_bytes") == {"weights": 10_448}
    engine = {"weights": 4304, "packed_weights": 567_344, "kv_cache": 64 * MIB // 3072 * 3072}
    assert find_bytes(ENGINE, "start", "start_engine") == engine
    assert find_bytes(ENGINE, "start", "start_engine", "peak_bytes") == engine
    assert find_bytes(ENGINE, "first", "generate") == engine | {"sync_staging": 8960}


def test_a_reload_has_the_largest_weight_twice_and_generation_has_activations_and_a_sampler() -> None:
    sync = find_bytes(ENGINE, "steady", "sync_weights", "peak_bytes")
    assert (sync["weights"], sync["packed_weights"]) == (4304 + 4096, 567_344 + 4096)
    # 2048 tokens: 2048*4*(4*20 + 3*8) + 2*2048*8*4; sampler 4*256*70*4
    for action in ("generate", "evaluate"):
        peak = find_bytes(ENGINE, "steady", action, "peak_bytes")
        assert (peak["activations"], peak["logits"]) == (983_040, 286_720)


def test_a_scorer_holds_weights_and_for_a_moment_one_layer_or_the_head() -> None:
    # a layer: 80 * 480 = 38,400; the head: (80 + 8)*70*4, its rows 80*8*4, normalizers 80*4 = 27,520
    assert find_bytes(SCORER, "steady", "score/reference") == {"weights": 8592}
    assert find_bytes(SCORER, "steady", "score/reference", "peak_bytes") == {"weights": 8592, "logits": 38_400}
    wide = make_ledger(model={"vocab_size": 700})
    logits = [row.peak_bytes for row in wide.rows if (row.process, row.kind) == (SCORER, "logits")]
    assert set(logits) == {(80 + 8) * 700 * 4 + 80 * (8 + 1) * 4}


@pytest.mark.parametrize(
    ("process", "imports", "slack"),
    [("policy_trainer/0", 100, 1), ("policy_trainer/1", 100, 1), (SCORER, 200, 2), (ENGINE, 300, 3)],
)
def test_every_process_holds_its_imports_and_slack_at_every_moment(process: str, imports: int, slack: int) -> None:
    by_place: dict[tuple[str, str], dict[str, LedgerRow]] = defaultdict(dict)
    for row in LEDGER.rows:
        if row.process == process:
            by_place[(row.run_phase, row.action_id)][row.kind.value] = row
    for (_, action), rows in by_place.items():
        # the engine's kernels: 5 shapes in 3 x 12 batch sizes, once it has worked
        code = 5 * 36 * 10_000 if process == ENGINE and action != "start_engine" else 0
        own, spare = rows.pop("process"), rows.pop("fragmentation")
        assert (own.resident_bytes, own.peak_bytes, own.provenance) == (imports * MIB, imports * MIB, "measured")
        # at the peak, one percent of all tensors on top
        tensors = sum(row.peak_bytes for row in rows.values())
        resident = slack * MIB + code
        assert (spare.resident_bytes, spare.peak_bytes) == (resident, resident + ceil_div(tensors, 100))


def test_the_driver_and_ray_count_on_the_host_all_the_time() -> None:
    rows = {row.process: row for row in LEDGER.rows if row.space == "host"}
    assert {name: row.resident_bytes for name, row in rows.items()} == {"driver/0": 10 * MIB, "ray_system": 20 * MIB}
    for moment in LEDGER._moments:
        assert {row.process for rows_then, _ in moment.processes for row in rows_then} >= set(rows), moment.place


def test_every_row_says_where_it_comes_from_and_when_it_holds() -> None:
    moments = set(LEDGER.order)
    for row in LEDGER.rows:
        assert (row.run_phase, row.action_id) in moments
        assert row.source
        assert row.resident_bytes >= 0
        assert row.peak_bytes >= 0
    assert [run_phase for run_phase, _ in LEDGER.order] == sorted(
        (run_phase for run_phase, _ in LEDGER.order), key=["start", "first", "steady", "finish"].index
    )


def test_processes_that_start_side_by_side_peak_together_and_a_chain_does_not() -> None:
    pairs = {frozenset(pair) for _, *pair in LEDGER.concurrent}
    starts = ("start_trainer", "start_engine", "start_scorer/reference")
    assert {frozenset((first, second)) for first in starts for second in starts if first != second} <= pairs
    assert frozenset(("generate", "train_forward_backward")) not in pairs
    assert frozenset(("optimizer_step", "sync_weights")) not in pairs


def test_a_job_of_one_step_has_no_later_steps() -> None:
    assert {row.run_phase for row in make_ledger(**{"workload.num_steps": 1}).rows} == {"start", "first", "finish"}


def test_the_evaluation_counts_in_the_first_step_only_where_it_happens() -> None:
    assert ("first", "evaluate") not in LEDGER.order
    assert ("first", "evaluate") in make_ledger(**{"workload.evaluate_every": 1}).order


def test_the_job_s_memory_goes_before_the_profile_s() -> None:
    assert LEDGER.host_capacity == 8192 * MIB
    assert make_ledger(**{"hardware.memory": None}).host_capacity == 16_384 * MIB


@pytest.mark.parametrize("placement", [Placement.HYBRID, Placement.DISAGGREGATED])
def test_the_host_s_total_is_the_sum_over_processes_at_that_moment(placement: Placement) -> None:
    ledger = make_ledger(placement)
    for peak in (ledger.host_peak(), *map(ledger.device_peak, ledger.devices)):
        assert peak.num_bytes == sum(size for *_, size in peak.rows)
        assert list(peak.rows) == sorted(peak.rows, key=lambda item: -item[3])
    assert {process for process, *_ in ledger.host_peak().rows} == set(ledger.processes)


sizes = st.fixed_dictionaries(
    {
        "workload": st.fixed_dictionaries(
            {
                "num_steps": st.integers(1, 3),
                "num_prompts_per_step": st.sampled_from([2, 4, 8]),
                "mini_batch_size": st.sampled_from([4, 8]),
                "micro_batch_size_per_gpu": st.integers(1, 8),
                "max_prompt_len": st.integers(1, 64),
                "max_response_len": st.integers(1, 64),
            }
        ),
        "rollout.kv_cache_memory": st.integers(10_000, 10**8),
        "placement.sync_bucket": st.integers(1, 10_000),
        "algorithm.kl_coef": st.sampled_from([0, 0.1]),
    }
)


@examples(40)
@given(sizes, st.integers(1, 4), st.sampled_from([Placement.HYBRID, Placement.DISAGGREGATED]))
def test_the_host_s_peak_is_at_least_every_process_s_and_device_s(
    overrides: dict[str, Any], num_layers: int, placement: Placement
) -> None:
    ledger = make_ledger(placement, {"num_layers": num_layers}, **overrides)
    host = ledger.host_peak().num_bytes
    processes = [ledger.process_peak(process).num_bytes for process in ledger.processes]
    assert host >= max(processes)
    assert host <= sum(processes)
    for device in ledger.devices:
        assert ledger.device_peak(device).num_bytes <= host


@examples(25)
@given(sizes, st.sampled_from(["response", "prompt", "kv", "layers", "vocabulary", "scorer"]), st.integers(1, 40))
def test_a_larger_job_never_needs_less(overrides: dict[str, Any], what: str, more: int) -> None:
    model = {"num_layers": 2, "vocab_size": 70}
    larger, larger_model = dict(overrides), dict(model)
    workload = overrides["workload"]
    if what == "response":
        larger["workload"] = workload | {"max_response_len": workload["max_response_len"] + more}
    elif what == "prompt":
        larger["workload"] = workload | {"max_prompt_len": workload["max_prompt_len"] + more}
    elif what == "kv":
        larger["rollout.kv_cache_memory"] = overrides["rollout.kv_cache_memory"] + 1000 * more
    elif what == "layers":
        larger_model["num_layers"] += more % 3 + 1
    elif what == "vocabulary":
        larger_model["vocab_size"] += more
    else:
        larger["algorithm.kl_coef"] = 0.1
    small, large = make_ledger(model=model, **overrides), make_ledger(model=larger_model, **larger)
    assert small.host_peak().num_bytes <= large.host_peak().num_bytes
    for process in small.processes:
        assert small.process_peak(process).num_bytes <= large.process_peak(process).num_bytes


@examples(25)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 64))
def test_a_larger_micro_batch_never_needs_less_while_gradients_are_accumulated(size: int, length: int) -> None:
    lengths = {"num_prompts_per_step": 16, "mini_batch_size": 64, "max_response_len": length}
    small, large = (make_ledger(workload=lengths | {"micro_batch_size_per_gpu": size * factor}) for factor in (1, 2))
    assert small.host_peak().num_bytes <= large.host_peak().num_bytes
    for process in small.processes:
        assert small.process_peak(process).num_bytes <= large.process_peak(process).num_bytes


def test_a_trainer_in_16_bits_holds_its_compiled_matmuls() -> None:
    def slack(dtype: str) -> int:
        ledger = make_ledger(training={"dtype": dtype})
        rows = [row for row in ledger.find_rows("policy_trainer/0") if row.kind is MemoryKind.FRAGMENTATION]
        return {row.resident_bytes for row in rows}.pop()

    assert slack("bfloat16") - slack("float32") == 14 * MIB


def test_a_heap_that_is_kept_has_holes_at_the_peak_and_none_between_actions() -> None:
    released, kept = make_ledger(), make_ledger(**{"hardware.keeps_heap": True})
    for before, after in zip(released.rows, kept.rows, strict=True):
        assert (before.kind, before.resident_bytes) == (after.kind, after.resident_bytes)
        if before.kind is not MemoryKind.FRAGMENTATION:
            assert before.peak_bytes == after.peak_bytes
    passes = [
        (row.peak_bytes, again.peak_bytes)
        for row, again in zip(released.rows, kept.rows, strict=True)
        if row.kind is MemoryKind.FRAGMENTATION and row.action_id == "train_forward_backward"
    ]
    assert passes
    assert all(after > before for before, after in passes)


def test_speculative_decoding_holds_numba_and_samples_more_rows_at_a_time() -> None:
    drafts = {"rollout.speculative_tokens": 3}
    plain, speculative_decoding = make_plan().ledger, make_plan(**drafts).ledger
    numba = make_plan().job.load_profile().process_slack.speculative_decoding
    assert numba is not None

    def find_row(ledger: MemoryLedger, kind: MemoryKind, action_id: str, run_phase: str) -> LedgerRow:
        return next(
            row
            for row in ledger.rows
            if (row.process, row.kind, row.action_id, row.run_phase) == ("rollout_engine/0", kind, action_id, run_phase)
        )

    slack = [
        find_row(ledger, MemoryKind.FRAGMENTATION, "start_engine", "start") for ledger in (plain, speculative_decoding)
    ]
    assert slack[1].resident_bytes - slack[0].resident_bytes == numba.value
    logits = [
        find_row(ledger, MemoryKind.LOGITS, "generate", "first").peak_bytes for ledger in (plain, speculative_decoding)
    ]
    assert logits[1] * 4 == logits[0] * 21  # 4 rows a sequence become 4 (1 + 3) + 3 + 2


def test_the_environment_s_processes_count_on_the_host_all_the_time() -> None:
    path = f"{EXAMPLES / 'environments' / 'guess_digit.py'}:play"
    rows = make_plan(**{"rollout.environment": {"path": path, "num_workers": 3}}).ledger.rows
    (row,) = [row for row in rows if row.process == "environment"]
    assert (row.device, row.resident_bytes, row.provenance) == ("host:0", 3 * 16 * MIB, "measured")
    assert not any(row.process == "environment" for row in make_plan().ledger.rows)


class Overdrawn(Forecast):
    """A forecast whose formula subtracts more than there is."""

    def predict_resident(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        return {MemoryKind.WEIGHTS: 10}

    def predict_peak(self, action: Action, run_phase: RunPhase) -> dict[MemoryKind, int]:
        return {MemoryKind.WEIGHTS: 10, MemoryKind.GRADIENTS: -1}


def test_bytes_below_zero_never_become_a_row_of_the_ledger() -> None:
    job = make_job()
    schedule = build_schedule(job, read_choice(job, Placement.HYBRID, 2))
    process = Process("policy_trainer/0", "cpu:0", Role.POLICY, Overdrawn())
    with pytest.raises(AssertionError, match="fewer than 0 bytes"):
        predict_ledger(schedule, [process], (), LEDGER, 1)
