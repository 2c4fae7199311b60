"""Which sandbox a run gets: the first that passes its self-test, or the one that is named; never none by itself.

In: a name. Out: a sandbox that was seen to hold, or a HostError that says what is missing.
"""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlplan.errors import HostError, RlplanError, SpecError, did_you_mean
from rlplan.runtime.sandbox.bubblewrap import INTERPRETER, Bubblewrap, compile_system_runner
from rlplan.runtime.sandbox.gvisor import Gvisor
from rlplan.runtime.sandbox.landlocked import Landlocked
from rlplan.runtime.sandbox.process import run_command
from rlplan.runtime.sandbox.programs import DEFAULT_LIMITS, Case, Limits, Program, Report, Sandbox

AUTO, NONE = "auto", "none"
BACKENDS: dict[str, Callable[[int, Limits], Sandbox]] = {
    "bubblewrap": Bubblewrap,
    "sandlock": Landlocked,
    "gvisor": Gvisor,
}
"""By name, those that are taken by themselves first."""
NAMES = (AUTO, *BACKENDS, NONE)


class Bare(Sandbox):
    """No sandbox at all: the runner in a plain process, with rlimits only. For trusted programs only.

    Chosen by name only (`rlplan run --sandbox none`), printed and recorded; nothing falls back to it.
    """

    name = "none"
    cannot_hold = "anything"

    def __init__(self, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(num_slots, limits)
        self._runner = compile_system_runner()

    def run_in_slot(self, slot: int, program: Program, *, stops_early: bool) -> Report:
        command = (INTERPRETER, *self._runner.flags)
        return run_command(command, self._runner.code, program, stops_early=stops_early, stop=self.stop)

    def clean(self) -> None:
        """Nothing is kept between runs."""


def open_sandbox(name: str, num_slots: int, limits: Limits = DEFAULT_LIMITS) -> Sandbox:
    """A tested sandbox for so many programs at once. Raises: HostError when there is none; SpecError for its name."""
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
    for each in BACKENDS if name == AUTO else (name,):
        try:
            sandbox = BACKENDS[each](num_slots, limits)
        except RlplanError as error:
            reasons.append(f"{each}: {error.what}")
            continue
        fault = self_test(sandbox)
        if fault is None:
            return sandbox
        sandbox.close()
        reasons.append(f"{each}: {fault}")
    raise HostError(
        f"no sandbox holds on this host ({'; '.join(reasons)})",
        where="code_executor",
        rule="code that a model wrote runs in a sandbox that has passed its self-test, or not at all",
        way_out="`make system-packages` installs bubblewrap; in a container allow user namespaces; "
        "`--sandbox none` runs the code unprotected",
    )


CANARY = "RLPLAN_CANARY"
"""A variable of the driver's, for as long as the self-test lasts: programs inside do not see it."""
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


def self_test(sandbox: Sandbox) -> str | None:
    """What a sandbox fails at, or None: it adds two numbers, keeps files, network, environment and processes out."""
    adds = sandbox.run(Program(_ADDS, (Case(b"17 25\n"),)))
    if _read_output(adds) != "42":
        return adds.detail or f"a program that adds two numbers was {adds.status}, {adds.cases[0].status}"
    with (
        tempfile.NamedTemporaryFile("w", prefix=f"rlplan-canary-{os.getpid()}-") as secret,
        socket.socket() as listener,
    ):
        Path(secret.name).chmod(0o644)
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
