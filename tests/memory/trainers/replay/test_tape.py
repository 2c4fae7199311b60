"""A tape: who holds a tensor, and where two gradients are added."""

from rlplan.memory.machine.segments import Segments
from rlplan.memory.trainers.replay.tape import Tape, Value
from rlplan.units import MIB


def test_a_pass_without_a_backward_pass_keeps_nothing() -> None:
    tape = Tape(Segments(), keeps=False)
    rows, result = tape.new(MIB), tape.new(MIB)
    tape.drop(tape.then(result, tape.keep(rows), tape.drop), rows)
    assert tape.segments.allocated == 0


def test_operators_go_back_from_the_last_to_the_first_and_leave_the_gradient_of_the_input() -> None:
    tape, order = Tape(Segments(), keeps=True), []
    rows, middle, result = (tape.new(MIB) for _ in range(3))

    def back_to(value: Value) -> None:
        tape.flow(value, tape.new(2 * MIB))
        order.append(value)

    def last(gradient: Value) -> None:
        back_to(middle)
        tape.drop(gradient)

    def first(gradient: Value) -> None:
        back_to(rows)
        tape.drop(gradient)

    tape.then(middle, tape.keep(rows), first)
    tape.then(result, tape.keep(middle), last)
    tape.drop(rows, middle, result)
    result.gradient = tape.new(MIB)
    tape.backward()
    assert order == [middle, rows]
    assert rows.gradient is not None
    assert tape.segments.allocated == 2 * MIB


def test_two_gradients_are_added_where_nobody_else_holds_one() -> None:
    tape = Tape(Segments(), keeps=True)
    value = tape.new(MIB)
    first, second, third = (tape.new(MIB) for _ in range(3))
    second.holders += 1
    tape.flow(value, first)
    tape.flow(value, second)
    assert value.gradient is first
    assert tape.segments.allocated == 4 * MIB  # somebody else still holds the second
    tape.drop(second)
    first.holders += 1
    tape.flow(value, third)
    assert value.gradient is third
