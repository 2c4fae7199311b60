"""The mapping tables: every key of ours exists, and every condition can hold."""

from typing import Any

import pytest
from pydantic import BaseModel

from rlplan.foreign.table import SOURCES, load_identity, load_table
from rlplan.planner.combinations import Effect
from rlplan.spec.job import JobSpec


def list_keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted keys of a spec, through optional parts."""
    keys = set()
    for name, field in model.model_fields.items():
        keys.add(prefix + name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys |= list_keys(kind, f"{prefix}{name}.")
    return keys


OURS = list_keys(JobSpec)


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_is_of_a_key_of_a_job(source: str) -> None:
    assert set(load_table(source).rows) - OURS == set()


@pytest.mark.parametrize("source", SOURCES)
def test_rows_ask_only_for_keys_of_ours_that_stand_above_them(source: str) -> None:
    above = {key for key in OURS if key.startswith("hardware.")}  # of the command line
    for ours, alternatives in load_table(source).rows.items():
        for row in alternatives:
            asked = {key for key in row.keys[1:] if key in OURS}
            own = {key for key in asked if key not in load_table(source).defaults}
            assert own - above == set(), f"{source}: {ours}"
        above.add(ours)


@pytest.mark.parametrize("source", SOURCES)
def test_every_default_is_of_a_key_that_some_row_or_remedy_asks_for(source: str) -> None:
    table = load_table(source)
    asked: set[Any] = set()
    for row in table.all_rows:
        asked |= set(row.keys)
    asked |= {key for condition in table.instead.values() for key in condition}
    for remedy in table.remedies:
        asked |= {remedy.key, *remedy.when, *remedy.with_}
    asked |= {key for required in table.required for key in (*required.keys, *required.when)}
    asked |= {key for mirrored in table.of_roles.values() for key in mirrored.values()}
    asked |= {key for fixed in table.fixed for key in (*fixed.keys, *fixed.when)}
    asked |= {key for words in table.stages.values() for key in words.split()}
    asked |= {value[2:-1] for value in table.defaults.values() if str(value).startswith("${")}
    assert set(table.defaults) - asked == set()


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_says_where_its_facts_are_from(source: str) -> None:
    table = load_table(source)
    assert len(table.commit) == 40 or table.commit == f"v{table.version}"
    assert table.files
    assert table.repository.count("/") == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_stack_is_recognised_by_the_head_of_its_table(source):
    table = load_table(source).model_dump()
    identity = load_identity(source).model_dump()
    assert identity == {name: table[name] for name in identity}


def test_a_table_that_stands_on_others_has_their_rows_where_it_has_none() -> None:
    offline, online = load_table("ms_swift"), load_table("ms_swift_online")
    shared = load_table("trl_given").rows["training.zero_stage"]
    assert offline.rows["training.zero_stage"] == online.rows["training.zero_stage"] == shared
    assert offline.rows["algorithm.name"] != load_table("trl_given").rows["algorithm.name"]
    assert next(iter(offline.rows)) == "hardware.num_devices"


CHANGED = {
    "training.lora.rank": Effect.TRAINS_LESS,
    "training.lora.base_dtype": Effect.TRAINS_LESS,
    "training.optimizer": Effect.NUMERICS,
    "workload.max_response_len": Effect.SMALLER_JOB,
    "hardware.num_hosts": Effect.MORE_HARDWARE,
}
"""Keys of a job whose change is no mere change of layout, with its least effect."""


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "vllm"])  # a server has no experiment
def test_a_remedy_that_changes_more_than_the_layout_states_its_effect(source: str) -> None:
    table = load_table(source)
    least = {
        row.key: effect for ours, effect in CHANGED.items() for row in table.rows.get(ours, ()) if row.key is not None
    }
    stated = {remedy.key: remedy.effect for remedy in table.remedies}
    assert {key for key in stated.keys() & least.keys() if stated[key] < least[key]} == set()
