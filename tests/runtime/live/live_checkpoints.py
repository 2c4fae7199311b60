"""Exercises of live trainer ranks with checkpoints: saved, read back, and taken over by other ranks."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.runtime.live.live_trainer import LiveRank


def digest_states(live: "LiveRank") -> dict[str, Any]:
    """A digest of every weight, whole, and of everything that this rank would save."""
    import torch

    from rlplan.memory.trainers.checkpoints import SAVED_KINDS
    from rlplan.runtime.checkpoints import eight_bit
    from rlplan.runtime.checkpoints.fragments import TrainedFragments

    weights = {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in live.call("weights")
    }
    states = TrainedFragments(live.trainer.engine)
    sums = {
        kind: [float(values.double().sum()) for f in states.saved if (values := states.values(kind, f)) is not None]
        for kind in SAVED_KINDS
    }
    sums |= {name: [float(tensor.double().sum())] for name, tensor in eight_bit.iterate_moments(states)}
    return {"weights": weights, "states": sums, "steps": states.num_steps}


def resume(live: "LiveRank") -> dict[str, Any]:
    """Two steps, a checkpoint, two steps more; then anew from the start weights, the checkpoint, and the same two."""
    folder = Path(live.case["folder"])
    path = str(folder / f"{live.job.name}.{live.rank}.safetensors")
    log = [_train(live) for _ in range(2)]
    if live.job.checkpoints.writes == "beside":
        live.call("reserve_staging")
    save_measurement = live.measured("save_states", path, live.job.checkpoints.writes == "waiting")
    saved = digest_states(live)
    log += [_train(live) for _ in range(2)]
    went_on = digest_states(live)
    live.call("reset", live.job.policy.path)
    live.trainer.saver.finish()
    import torch.distributed as dist

    dist.barrier()
    paths = sorted(map(str, folder.glob(f"{live.job.name}.*.safetensors")))
    facts = json.loads(Path(path).with_suffix(".receipt").read_text())
    live.call("load_states", paths, path, facts)
    loaded = digest_states(live)
    again = [_train(live) for _ in range(2)]
    return {
        "log": log,
        "again": again,
        "saved": saved,
        "loaded": loaded,
        "went_on": went_on,
        "resumed": digest_states(live),
        "facts": facts,
        "held": save_measurement,
    }


def take_over(live: "LiveRank") -> dict[str, Any]:
    """The checkpoint of other ranks, and one step."""
    folder = Path(live.case["folder"])
    paths = sorted(map(str, folder.glob(f"{live.job.name}.*.safetensors")))
    facts = json.loads(Path(paths[0]).with_suffix(".receipt").read_text())
    live.call("load_states", paths, "", facts)
    return {"loaded": digest_states(live), "next": _train(live)}


def _train(live: "LiveRank") -> dict[str, float]:
    from tests.runtime.live.live_trainer import train

    return train(live)
