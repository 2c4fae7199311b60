"""Totals of a ledger made by hand: what counts at each moment, what is carried, what adds up."""

from typing import Any

import pytest

from rlplan.dataflow.schedule import Beside
from rlplan.memory.ledger import LedgerRow, MemoryLedger
from rlplan.vocabulary import MemoryKind, Phase, Provenance, Role


def row(moment: str, action: str, process: str, resident: int, peak: int, **more: Any) -> LedgerRow:
    fields: dict[str, Any] = {
        "phase": Phase.TRAIN,
        "device": "cpu:0",
        "role": Role.POLICY,
        "kind": MemoryKind.WEIGHTS,
        "space": "device",
        "provenance": Provenance.DERIVED,
        "source": "by hand",
    }
    return LedgerRow(
        run_phase=moment,  # type: ignore[arg-type]
        action_id=action,
        process=process,
        resident_bytes=resident,
        peak_bytes=peak,
        **(fields | more),
    )


KV = {"kind": MemoryKind.KV_CACHE}
ROWS = (
    row("start", "load", "a", 10, 25),
    row("start", "load", "a", 5, 5, **KV),
    row("start", "warm", "b", 7, 9, device="cpu:1"),
    row("start", "load", "driver", 100, 100, device="host:0", space="host", kind=MemoryKind.PROCESS),
    row("first", "train", "a", 12, 40),
    row("first", "train", "a", 0, 3, **KV),
    row("first", "sync", "a", 12, 13),
    row("first", "sync", "b", 8, 30, device="cpu:1"),
)
ORDER = (("start", "load"), ("start", "warm"), ("first", "train"), ("first", "sync"))


def make_ledger(**changes: Any) -> MemoryLedger:
    fields: dict[str, Any] = {
        "rows": ROWS,
        "device_capacity": 64,
        "host_capacity": 1000,
        "shares_host_memory": True,
        "order": ORDER,
    }
    return MemoryLedger(**(fields | changes))


def test_a_process_peaks_where_its_rows_add_up_to_most() -> None:
    peak = make_ledger().process_peak("a")
    # load 25 + 5 = 30; train 40 + 3 = 43; sync 13
    assert (peak.scope, peak.run_phase, peak.action_id, peak.num_bytes) == ("a", "first", "train", 43)
    assert peak.rows == (("a", Role.POLICY, MemoryKind.WEIGHTS, 40), ("a", Role.POLICY, MemoryKind.KV_CACHE, 3))
    assert make_ledger().process_peak("b").num_bytes == 30


def test_on_a_cpu_host_everything_counts_and_idle_processes_keep_what_they_held() -> None:
    # load: 30 + 100 = 130; warm: a keeps 15, b 9, driver 100 = 124; train: 43 + b 7 + 100 = 150;
    # sync: a 13 + b 30 + 100 = 143
    peak = make_ledger().host_peak()
    assert (peak.run_phase, peak.action_id, peak.num_bytes) == ("first", "train", 150)
    assert peak.rows[0] == ("driver", Role.POLICY, MemoryKind.PROCESS, 100)
    assert sum(size for *_, size in peak.rows) == 150


def test_a_device_counts_its_own_rows_only() -> None:
    ledger = make_ledger()
    assert ledger.devices == ("cpu:0", "cpu:1")
    assert (ledger.device_peak("cpu:0").num_bytes, ledger.device_peak("cpu:0").action_id) == (43, "train")
    assert (ledger.device_peak("cpu:1").num_bytes, ledger.device_peak("cpu:1").action_id) == (30, "sync")


def test_with_separate_device_memory_the_host_counts_host_rows_only() -> None:
    assert make_ledger(shares_host_memory=False).host_peak().num_bytes == 100


def test_actions_that_may_run_at_once_add_up() -> None:
    ledger = make_ledger(concurrent=(("start", "load", "warm"),))
    # load and warm together: 30 + 9 + 100 = 139, at either of them; train still 150
    assert ledger.host_peak().num_bytes == 150
    alone = make_ledger(concurrent=(("start", "load", "warm"),), rows=ROWS[:4], order=ORDER[:2])
    assert alone.host_peak().num_bytes == 139
    apart = make_ledger(rows=ROWS[:4], order=ORDER[:2])
    assert apart.host_peak().num_bytes == 130


def test_three_actions_at_once_add_up_too() -> None:
    rows = (
        row("start", "one", "a", 1, 10),
        row("start", "two", "b", 1, 20),
        row("start", "three", "c", 1, 30),
    )
    order = (("start", "one"), ("start", "two"), ("start", "three"))
    pairs: tuple[Beside, ...] = (("start", "one", "two"), ("start", "one", "three"), ("start", "two", "three"))
    assert make_ledger(rows=rows, order=order, concurrent=pairs).host_peak().num_bytes == 60
    assert make_ledger(rows=rows, order=order).host_peak().num_bytes == 32  # 1 + 1 + 30


def test_what_goes_on_elsewhere_adds_up_nothing_that_follows_one_another_here() -> None:
    """Worked by hand: scoring (20 beside a trainer that waits with 1), then training (30 beside a scorer with 2), both
    beside generation on another device: 32 and never 50.
    """
    rows = (
        row("steady", "generate", "engine", 5, 70, device="cuda:1", space="device"),
        row("steady", "score", "scorer", 2, 20, device="cuda:0", space="device"),
        row("steady", "train", "trainer", 1, 30, device="cuda:0", space="device"),
    )
    order = (("steady", "generate"), ("steady", "score"), ("steady", "train"))
    beside: tuple[Beside, ...] = (("step", "generate", "score"), ("step", "generate", "train"))
    ledger = make_ledger(rows=rows, order=order, concurrent=beside, shares_host_memory=False)
    assert (ledger.device_peak("cuda:0").num_bytes, ledger.device_peak("cuda:1").num_bytes) == (32, 70)
    assert ledger.device_totals("cuda:0")[("steady", "generate")] == 32


def test_a_pair_of_the_same_names_in_another_part_does_not_count() -> None:
    rows = (row("first", "train", "a", 5, 50), row("finish", "evaluate", "b", 1, 7), row("finish", "train", "a", 5, 9))
    order = (("first", "train"), ("finish", "evaluate"), ("finish", "train"))
    ledger = make_ledger(rows=rows, order=order, concurrent=(("finish", "evaluate", "train"),))
    assert ledger.host_peak().num_bytes == 50


def test_a_pair_of_the_start_is_none_of_a_step_whose_actions_have_the_same_names() -> None:
    """Worked by hand: two roles are offloaded side by side while starting, and one after the other in every step."""
    rows = (
        row("start", "park/a", "a", 1, 10),
        row("start", "park/b", "b", 1, 20),
        row("steady", "park/a", "a", 1, 40),
        row("steady", "park/b", "b", 1, 50),
    )
    order = (("start", "park/a"), ("start", "park/b"), ("steady", "park/a"), ("steady", "park/b"))
    ledger = make_ledger(rows=rows, order=order, concurrent=(("start", "park/a", "park/b"),))
    assert ledger.host_totals("host") == dict(zip(order, (30, 30, 41, 51), strict=True))


def test_processes_come_in_order_of_appearance() -> None:
    assert make_ledger().processes == ("a", "b", "driver")


def test_rows_of_nothing_are_left_out_of_a_peak() -> None:
    ledger = make_ledger(rows=(row("start", "load", "a", 0, 5), row("start", "load", "a", 0, 0, **KV)), order=ORDER[:1])
    assert ledger.host_peak().rows == (("a", Role.POLICY, MemoryKind.WEIGHTS, 5),)


@pytest.mark.parametrize("kind", [MemoryKind.WEIGHTS, MemoryKind.PROCESS])
def test_what_a_process_held_after_its_last_action_replaces_all_that_it_held_before(kind: MemoryKind) -> None:
    rows = (
        row("start", "load", "a", 10, 10),
        row("start", "load", "a", 90, 90, **KV),
        row("first", "train", "a", 10, 10, kind=kind),
        row("first", "sync", "b", 1, 1),
    )
    ledger = make_ledger(rows=rows, order=ORDER)
    assert ledger.host_totals("host") == {ORDER[0]: 100, ORDER[1]: 100, ORDER[2]: 10, ORDER[3]: 11}


def test_devices_and_hosts_of_another_kind_have_their_own_capacity() -> None:
    ledger = MemoryLedger(
        (), 80, 2000, shares_host_memory=False, order=(), capacities=(("cuda:8", 48), ("host:1", 900))
    )
    assert (ledger.get_device_capacity("cuda:0"), ledger.get_device_capacity("cuda:8")) == (80, 48)
    assert (ledger.get_host_capacity("host:0"), ledger.get_host_capacity("host:1")) == (2000, 900)
