"""`rlplan run BUNDLE --out FOLDER` of a plan for GPUs, with stand-ins in place of the GPUs.

    python -m tests.runtime.device.run_on_stand_ins NUM_BYTES BUNDLE FOLDER

All is the runtime's own but for three things: nobody asks whether the GPUs and the CUDA builds are there, and workers
are those of stand_in_workers.py.
"""

import os
import sys
import tempfile

from rlplan_cli.app import main

from rlplan.runtime.cluster import worker_group
from rlplan.runtime.driver import launch, preflight

WORKERS = "tests.runtime.device.stand_in_workers"
CLASSES = {
    "policy_trainer": "CountedPolicyTrainer",
    "value_trainer": "CountedValueTrainer",
    "rollout_engine": "SleepingRolloutEngine",
    "scorer": "CountedScorer",
}


def run(num_bytes: str, bundle: str, folder: str) -> None:
    launch.check_devices = lambda *_: None
    preflight.check_packages = lambda *_: None
    worker_group._WORKER_CLASSES.update({worker: f"{WORKERS}:{name}" for worker, name in CLASSES.items()})
    with tempfile.TemporaryDirectory() as devices:
        os.environ.update(STAND_IN_FOLDER=devices, STAND_IN_NUM_BYTES=num_bytes)
        sys.argv = ["rlplan", "run", bundle, "--out", folder]
        main()


if __name__ == "__main__":
    run(*sys.argv[1:])
