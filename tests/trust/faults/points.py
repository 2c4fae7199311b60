"""The axes of the fault matrix: which process, at which point of a step, by what, and in which kind of run."""

import signal

VICTIMS = ("driver", "trainer", "engine", "scorer", "raylet", "gcs")
POINTS = {
    "generate": ("generate", "take_rollouts"),
    "verify": ("verify",),
    "score": ("score",),
    "train": ("train_forward_backward",),
    "optimizer": ("optimizer_step",),
    "save": ("save_states", "write_states"),
    "sync": ("sync_weights", "save_weights"),
    "end of step": ("finish_step",),
}
"""Points of a step, with the kinds of actions that begin them."""
KINDS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "segfault": signal.SIGSEGV, "exit": None}
"""exit: a worker and the driver by `_exit`, Ray's own on SIGTERM."""

AHEAD = ("placement.placement=disaggregated", "placement.max_staleness=1")
MODES = {
    "synchronous": (),
    "colocated": ("placement.placement=colocated", "placement.offload=disk", "rollout.kv_cache_memory=64MiB"),
    "asynchronous": AHEAD,
}
"""Modes, with the overrides that turn the quickstart into each."""
NUM_SLICES = 12
"""Slices of all cells: each has every pair of a victim and a point once, and every pair of two axes."""
