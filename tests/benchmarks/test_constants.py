"""Fitted constants of trainers: each is better than none for points that it was not fitted to."""

from importlib import import_module

from benchmarks.constants.trainers import CONSTANTS, LeftOut, left_out


def test_no_fitted_constant_is_worse_for_unseen_points_than_to_have_none() -> None:
    for row in left_out():
        assert row.num_points >= 2, row
        assert row.error < row.without, row


def test_every_constant_has_a_row_for_the_value_in_use_and_for_each_source_it_was_fitted_to() -> None:
    rows = [(row.constant, row.fitted) for row in left_out()]
    assert rows == [(constant.name, fitted) for constant in CONSTANTS for fitted in constant.fits]
    for constant in CONSTANTS:
        assert constant.fits["now"] == getattr(import_module(constant.module), constant.attribute), constant.name


def test_a_row_is_told_in_the_constant_s_unit() -> None:
    row = LeftOut("X, MiB", "one", 140.0, 12, 2.345, 3.0)
    assert row.cells() == ["X, MiB", "one", "140", "12", "2.3 %", "3.0 %"]
