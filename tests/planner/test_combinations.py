"""Sets of changes that fit together are minimal, milder ones come first, and few jobs are planned to find them."""

from rlplan.planner.combinations import Combinations, Effect, Kind, Trial, Values

FREE = {"checkpointing": 5, "offload": 2, "micro": 3}
COSTLY = {"adam8": (4, Effect.NUMERICS), "lora": (9, Effect.TRAINS_LESS), "shorter": (20, Effect.SMALLER_JOB)}
KINDS = [
    *(Kind(({key: 1},)) for key in FREE),
    *(Kind(({key: 1},), effect) for key, (_, effect) in COSTLY.items()),
]


def list_changes(missing: int, kinds: list[Kind] = KINDS, enough: int = 1) -> tuple[list[set[str]], int]:
    """Keys of the changes with which a job that lacks `missing` bytes fits, and the number of planned jobs."""
    planned: list[Values] = []

    def plan_values(values: Values) -> Trial[None]:
        planned.append(values)
        saved = sum((FREE | {key: size for key, (size, _) in COSTLY.items()})[key] for key in values)
        return Trial(None, saved >= missing, max(0, missing - saved))

    changes = [set(values) for values, _ in Combinations(kinds, plan_values, enough, 100)]
    return changes, len(planned)


def test_a_single_change_without_effect_on_training_is_preferred_to_any_set() -> None:
    assert list_changes(5)[0] == [{"checkpointing"}]


def test_pairs_without_effect_come_before_single_changes_of_what_is_trained() -> None:
    changes, _ = list_changes(7)
    assert {"checkpointing", "offload"} in changes
    assert not any({"lora", "shorter"} & keys for keys in changes)


def test_checkpointing_with_8_bit_adam_comes_before_adapters() -> None:
    changes, _ = list_changes(12)
    assert {"checkpointing", "micro", "adam8"} in changes
    assert not any("lora" in keys for keys in changes)


def test_every_set_is_minimal_and_takes_few_plans() -> None:
    for missing in range(1, 24):
        changes, num_planned = list_changes(missing)
        assert changes, missing
        sizes = FREE | {key: size for key, (size, _) in COSTLY.items()}
        for keys in changes:
            assert all(sum(sizes[key] for key in keys - {left_out}) < missing for left_out in keys)
        assert num_planned < 2 ** len(KINDS) // 2


def test_where_nothing_fits_together_nothing_is_listed() -> None:
    assert list_changes(1000)[0] == []


def test_changes_of_one_key_that_contradict_each_other_are_never_put_together() -> None:
    kinds = [Kind(({"lora": 64},), Effect.TRAINS_LESS), Kind(({"lora": 16},), Effect.TRAINS_LESS), *KINDS]
    assert all(len(keys) == len(set(keys)) for keys in list_changes(13, kinds)[0])


def test_a_kind_whose_ends_change_nothing_is_not_tried_between_them() -> None:
    planned: list[Values] = []

    def plan_values(values: Values) -> Trial[None] | None:
        planned.append(values)
        return None if values == {"micro": 6} else Trial(None, False, 4)

    kinds = [Kind(tuple({"micro": size} for size in range(1, 7)))]
    assert [*Combinations(kinds, plan_values, 1, 100, 4)] == []
    assert planned == [{"micro": 1}, {"micro": 6}, {"micro": 5}]
    planned.clear()
    assert [*Combinations(kinds, plan_values, 1, 100, 5)] == []
    assert planned == [{"micro": size} for size in range(1, 7)]
