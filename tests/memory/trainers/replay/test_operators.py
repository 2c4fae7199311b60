"""Operators of plain modules: what is kept, and the largest moment, worked by hand."""

from collections.abc import Callable

from rlplan.memory.machine.segments import Segments
from rlplan.memory.trainers.replay.operators import NORM_ROWS, Operators
from rlplan.memory.trainers.replay.tape import Tape, Value

TOKENS, WIDTH = 4096, 1024
ROWS = 2 * TOKENS * WIDTH
"""Bytes of rows in 16 bits."""
SCALES = 4 * TOKENS


def operators(*, keeps: bool = True) -> Operators:
    return Operators(Tape(Segments(), keeps=keeps), TOKENS)


def sent_back(o: Operators, run: Callable[[Value], Value]) -> tuple[int, int]:
    """Bytes kept, and at most on the way back beside them, the input's gradient included."""
    rows = o.rows(WIDTH)
    result = run(rows)
    o.tape.drop(rows, result)
    kept = o.tape.segments.allocated
    o.tape.segments.peak_allocated = 0
    result.gradient = o.rows(WIDTH)
    o.tape.backward()
    assert o.tape.segments.allocated == ROWS  # the gradient of the input
    return kept, o.tape.segments.peak_allocated


def test_a_norm_keeps_its_input_in_fp32_and_has_six_such_tensors_going_back() -> None:
    o = operators()
    kept, most = sent_back(o, lambda rows: o.norm(rows, WIDTH))
    assert kept == 2 * ROWS + 2 * SCALES
    assert most == 6 * 2 * ROWS + 2 * SCALES


def test_a_norm_without_a_backward_pass_gives_all_but_its_result_back() -> None:
    o = operators(keeps=False)
    rows = o.rows(WIDTH)
    o.norm(rows, WIDTH)
    assert o.tape.segments.allocated == 2 * ROWS
    assert o.tape.segments.peak_allocated == ROWS + 2 * 2 * ROWS + 2 * SCALES  # two in fp32, when the mean is taken


def test_liger_s_norm_keeps_its_input_as_it_is() -> None:
    o = operators()
    kept, most = sent_back(o, lambda rows: o.fused_norm(rows, WIDTH))
    assert kept == ROWS + SCALES
    assert most == 3 * ROWS + SCALES + NORM_ROWS * WIDTH * 4  # its input, both gradients, its weight's


def test_turning_rows_keeps_nothing_and_has_four_of_them_going_back() -> None:
    o = operators()
    kept, most = sent_back(o, lambda rows: o.rotary(rows, WIDTH))
    assert kept == 0
    assert most == 4 * ROWS  # the gradient, its share by sine, both halves of the input's


def test_a_sum_hands_one_gradient_to_both() -> None:
    o = operators()
    rows, others = o.rows(WIDTH), o.rows(WIDTH)
    result = o.add(rows, others, WIDTH)
    result.gradient = o.rows(WIDTH)
    o.tape.backward()
    assert rows.gradient is others.gradient
    assert rows.gradient is not None
    assert rows.gradient.holders == 2


def test_liger_s_activation_writes_gradients_over_what_it_read() -> None:
    o = operators()
    gate, up = o.rows(WIDTH), o.rows(WIDTH)
    result = o.gated(gate, up, WIDTH)
    o.tape.drop(result, gate, up)
    result.gradient = o.rows(WIDTH)
    o.tape.segments.peak_allocated = 0
    o.tape.backward()
    assert gate.gradient is gate
    assert up.gradient is up
    assert o.tape.segments.allocated == 2 * ROWS
