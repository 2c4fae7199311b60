"""No sandbox at all: the runner in a plain process, with rlimits only. Whoever runs this trusts every program.

In: programs. Out: reports. Chosen by name only (`rlplan run --sandbox none`), printed and recorded; nothing falls
back to it.
"""

from rlplan.runtime.sandbox.bubblewrap import INTERPRETER, system_runner
from rlplan.runtime.sandbox.process import run_in
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Limits, Program, Report


class Bare:
    name = "none"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits, self._runner = limits, system_runner()

    def run(self, program: Program, *, stops_early: bool = False) -> Report:
        return run_in((INTERPRETER, *self._runner.flags), self._runner.code, program, stops_early=stops_early)

    def close(self) -> None:
        """Nothing is kept between runs."""
