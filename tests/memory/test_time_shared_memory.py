"""Memory of a colocated plan: the role that waits holds its libraries and nothing else."""

from rlplan.memory.ledger import LedgerRow
from rlplan.memory.machine.machine import UNSEEN_SHARE_PERCENT
from rlplan.planner.plan import Plan
from rlplan.vocabulary import MemoryKind
from tests.factories import EXAMPLES, make_plan

OVERHEADS = {MemoryKind.PROCESS, MemoryKind.FRAGMENTATION}
JOB = {"policy.path": str(EXAMPLES / "models" / "decoder-160m"), "policy.init": "random", "hardware.memory": "16GiB"}


def search_plan(placement: str, offload: str = "none") -> Plan:
    return make_plan(**JOB, placement={"placement": placement, "offload": offload})


def rows(plan: Plan, action_id: str, process: str) -> list[LedgerRow]:
    return [
        row for row in plan.ledger.rows if (row.run_phase, row.action_id, row.process) == ("steady", action_id, process)
    ]


def test_a_stopped_engine_holds_its_libraries_alone_and_has_the_same_as_ever_when_it_is_back() -> None:
    plan = search_plan("colocated")
    assert {row.kind for row in rows(plan, "stop_engine", "rollout_engine/0") if row.resident_bytes} == OVERHEADS
    back = {row.kind: row.resident_bytes for row in rows(plan, "start_engine", "rollout_engine/0")}
    before = {row.kind: row.resident_bytes for row in rows(plan, "generate", "rollout_engine/0") if row.resident_bytes}
    assert before.items() <= back.items()


def test_while_training_a_colocated_host_holds_less_by_what_the_engine_held() -> None:
    hybrid, colocated = search_plan("hybrid"), search_plan("colocated")
    run_phase = ("steady", "train_forward_backward")
    saved = hybrid.ledger.host_totals("host")[run_phase] - colocated.ledger.host_totals("host")[run_phase]
    staging = [row.resident_bytes for row in hybrid.ledger.rows if row.kind is MemoryKind.SYNC_STAGING]
    engine = sum(
        row.resident_bytes
        for row in rows(hybrid, "generate", "rollout_engine/0")
        if row.kind not in (*OVERHEADS, MemoryKind.SYNC_STAGING)
    )
    slack = saved - engine - 2 * max(staging)
    assert slack == max(staging) * UNSEEN_SHARE_PERCENT // 100, "the trainer's share for what nobody sees"


def test_without_a_hand_over_there_is_no_staging() -> None:
    assert not [row for row in search_plan("colocated").ledger.rows if row.kind is MemoryKind.SYNC_STAGING]


def test_a_offloaded_reference_is_there_while_it_scores_and_gone_while_the_policy_trains() -> None:
    plan = search_plan("colocated", offload="disk")
    weights = {
        action: sum(row.resident_bytes for row in rows(plan, action, "scorer/reference/0") if row.kind == "weights")
        for action in ("reload_role/reference", "score/reference", "offload_role/reference")
    }
    assert weights["score/reference"] == weights["reload_role/reference"] > 0
    assert weights["offload_role/reference"] == 0
    less = search_plan("colocated").ledger.host_peak().num_bytes - plan.ledger.host_peak().num_bytes
    assert less == weights["score/reference"]
