"""Weight verification: whether engines have the trainer's weights, by checksums of what they received or read.

In: checksums by weight, from the trainer and from an engine's process; what a process found in its own parameters.
Out: nothing, or an error that ends the update. Left out: how parameters are compared (engine_state.py).
What an engine makes of right weights only its log-probs show (logprob_mismatch.py).
"""

from collections.abc import Mapping

from rlplan.errors import RunError
from rlplan.runtime.weight_sync.channel import VerificationReport, as_hex
from rlplan.spec.resolved import ResolvedJob
from rlplan.vocabulary import SyncContent, Transport

_OTHER_TRANSPORT = {
    Transport.SHARED_MEMORY: Transport.GLOO,
    Transport.GLOO: Transport.DISK,
    Transport.DISK: Transport.GLOO,
    Transport.CUDA_IPC: Transport.NCCL,
}
_NAMED = 3
"""So many weights are named in a message."""


def check_weights(held: Mapping[str, int], fed: Mapping[str, int], engine: str, version: int, job: ResolvedJob) -> None:
    """Raises: RunError where an engine's process was given another weight than the trainer holds, or not all."""
    lost = [name for name in held if name not in fed]
    other = [name for name in held if name in fed and fed[name] != held[name]]
    if not (lost or other):
        return
    if lost:
        what = f"{engine} has got {len(held) - len(lost)} of {len(held)} weights: not {_join_names(lost)}"
    else:
        first = other[0]
        what = (
            f"{engine} has got other weights than the trainer holds, {len(other)} of {len(held)}: {_join_names(other)}; "
            f"the checksum of the first is {as_hex(fed[first])}, the trainer's {as_hex(held[first])}"
        )
    raise mismatch_error(what, version, job)


def check_engine(report: VerificationReport, engine: str, version: int, job: ResolvedJob) -> None:
    """Raises: RunError where an engine's own parameters are not the trainer's weights, after they were loaded."""
    if report.different:
        what = (
            f"{engine} computes with other weights than the trainer's: {len(report.different)} of its "
            f"{report.num_compared} parameters differ after loading: {_join_names(list(report.different))}"
        )
    elif report.untaken:
        what = (
            f"{engine} has a parameter for all but {len(report.untaken)} of the trainer's weights: "
            f"vLLM did not load {_join_names(list(report.untaken))}"
        )
    elif report.kept_back:
        what = (
            f"{engine} reads {len(report.kept_back)} weights when their memory may hold others: "
            f"vLLM holds {_join_names(list(report.kept_back))} back while later packets arrive"
        )
    else:
        return
    raise RunError(
        what,
        where=f"weight sync, version {version}, compared after loading",
        rule="every parameter of an engine holds the trainer's weights, bit for bit",
        way_out=f"{_other_transport(job)}; if that fails too, vLLM loads this model wrongly: report it with the folder",
    )


def mismatch_error(what: str, version: int, job: ResolvedJob) -> RunError:
    return RunError(
        what,
        where=f"weight sync, version {version}",
        rule="the checksum of every weight that an engine is given is the trainer's",
        way_out=f"the update is sent once more automatically; if that fails too, {_other_transport(job)}",
    )


def check_fresh(is_behind: bool, version: int, sampled: set[int], step: int) -> None:
    """Raises: RunError where a step's tokens came from other weights than those of now, though no step may be late.

    is_behind: whether the trainer has stepped since it handed its weights over. sampled: the versions of the tokens.
    """
    if is_behind:
        what = f"the policy was trained after version {version} was handed over, and never handed over again"
    elif sampled - {version}:
        what = f"rollouts came from weights of version {min(sampled - {version})}, the trainer's are version {version}"
    else:
        return
    raise RunError(
        what,
        where=f"step {step}, train_forward_backward",
        rule="rollouts of a synchronous job must come from the weights being trained",
        way_out="report it with the run folder",
    )


def _other_transport(job: ResolvedJob) -> str:
    if job.placement.sync_content is not SyncContent.FULL:
        return f"send everything: placement.sync_content={SyncContent.FULL}"
    other = _OTHER_TRANSPORT.get(job.sync_transport)
    return f"use another transport: placement.transport={other}" if other else "report it with the run folder"


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
