"""Choice of a run's sandbox: the named one, or the first that passes its self-test; never silently none.

In: a name. Out: a sandbox that passed its self-test, or a HostError that says what is missing.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlplan.errors import HostError, RlplanError, SpecError, did_you_mean
from rlplan.runtime.sandbox.bubblewrap import INTERPRETER, Bubblewrap, compile_system_runner
from rlplan.runtime.sandbox.landlocked import Landlocked
from rlplan.runtime.sandbox.process import run_command
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Case, Limits, Program, Report, Sandbox

AUTO, NONE = "auto", "none"
BACKENDS: dict[str, Callable[[int, Limits], Sandbox]] = {"bubblewrap": Bubblewrap, "sandlock": Landlocked}
"""Sandboxes by name, in the order in which `auto` tries them."""
NAMES = (AUTO, *BACKENDS, NONE)


class Bare(Sandbox):
    """No isolation: the runner starts as a plain process with rlimits. Use it for trusted programs only.

    It must be chosen by name (`rlplan run --sandbox none`), and the run prints and records the choice.
    """

    name = "none"
    cannot_hold = "anything"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(num_slots, limits)
        self._runner = compile_system_runner()

    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        command = (INTERPRETER, *self._runner.flags)
        return run_command(
            command, self._runner.code, program, stops_early=stops_early, stop=self.stop, owns_folder=False
        )

    def clean(self) -> None:
        """Do nothing: no state is kept between runs."""


def open_sandbox(name: str, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> Sandbox:
    """A tested sandbox for `num_slots` concurrent programs. Raises: HostError without one; SpecError for its name."""
    if name == NONE:
        return Bare(num_slots, limits)
    if name not in NAMES:
        raise SpecError(
            f"there is no sandbox '{name}'",
            where="--sandbox",
            rule=f"one of {', '.join(NAMES)}." + did_you_mean(name, NAMES),
            way_out="leave the option out",
        )
    reasons = []
    for backend in BACKENDS if name == AUTO else (name,):
        try:
            sandbox = BACKENDS[backend](num_slots, limits)
        except RlplanError as error:
            reasons.append(f"{backend}: {error.what}")
            continue
        fault = check_sandbox(sandbox)
        if fault is None:
            return sandbox
        sandbox.close()
        reasons.append(f"{backend}: {fault}")
    raise HostError(
        f"no sandbox works on this host ({'; '.join(reasons)})",
        where="code_executor",
        rule="code written by a model runs only in a sandbox that passed its self-test",
        way_out="`make system-packages` installs bubblewrap; in a container allow user namespaces; "
        "`--sandbox none` runs the code unprotected",
    )


CANARY = "RLPLAN_CANARY"
"""Environment variable that the driver sets during the self-test; programs inside must not see it."""
_ADDS = "print(sum(map(int, input().split())))"
_TRIES = """
import os, socket
said = []
for path in {paths!r}:
    try:
        open(path).read()
        said.append("read " + path)
    except OSError:
        pass
try:
    socket.create_connection(("127.0.0.1", {port}), 0.5)
    said.append("connected")
except OSError:
    pass
if "{canary}" in os.environ:
    said.append("read the environment")
try:
    os.kill({pid}, 0)
    if os.getpid() != {pid}:
        said.append("found the driver's process")
except OSError:
    pass
print(",".join(said) or "held")
"""


def check_sandbox(sandbox: Sandbox) -> str | None:
    """The first failure of a sandbox, or None.

    One program must add two numbers. A second one must reach neither files, network, environment nor host processes.
    """
    adds = sandbox.run(Program(_ADDS, (Case(b"17 25\n"),)))
    if _read_output(adds) != "42":
        return adds.detail or f"a program that adds two numbers was {adds.status}, {adds.cases[0].status}"
    with (
        tempfile.NamedTemporaryFile("w", prefix=f"rlplan-canary-{os.getpid()}-") as secret,
        socket.socket() as listener,
    ):
        Path(secret.name).chmod(0o644)  # readable for every user, so that only the sandbox can hide it
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        tries = _TRIES.format(
            paths=[secret.name, "/etc/passwd", str(Path(__file__))],
            port=listener.getsockname()[1],
            canary=CANARY,
            pid=os.getpid(),
        )
        os.environ[CANARY] = "1"
        try:
            output = _read_output(sandbox.run(Program(tries, (Case(),))))
        finally:
            del os.environ[CANARY]
    return None if output == "held" else f"a program {output or 'broke it'}"


def _read_output(report: Report) -> str:
    return report.cases[0].output.decode("utf-8", "replace").strip() if report.status == "done" else ""
