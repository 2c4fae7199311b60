"""The driver stays small: what it imports, and what the workers send to it, brings neither torch nor an engine."""

import subprocess
import sys

from rlplan.runtime.processes.machine_speed import scale_seconds

HEAVY = ("torch", "numpy", "vllm", "deepspeed", "transformers", "pandas")
DRIVER = "rlplan.runtime.driver.launch"
SENT = (
    "rlplan.runtime.weight_sync.channel.SendReport",
    "rlplan.runtime.weight_sync.channel.Endpoint",
    "rlplan.runtime.rollout.experience.FinishedRequest",
    "rlplan.runtime.measure.memory_meter.Measurement",
)
"""Classes of what workers answer: unpickling one imports its module in the driver."""


def test_the_driver_and_what_it_is_sent_import_nothing_heavy() -> None:
    modules = sorted({DRIVER, *(name.rpartition(".")[0] for name in SENT)})
    code = f"import sys, {', '.join(modules)}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scale_seconds(60), check=True
    )
    assert done.stdout.strip() == "[]"
    for name in SENT:
        module, _, attribute = name.rpartition(".")
        assert hasattr(sys.modules.get(module) or __import__(module, fromlist=[attribute]), attribute)
