"""Weight verification: checks that engines have the trainer's weights, by checksums of received or read weights.

In: checksums by weight, from the trainer and from an engine process; an engine process's own comparison.
Out: nothing, or an error that ends the update. Left out: comparing parameters (engine_state.py), and numerical
differences of an engine with the right weights (logprob_mismatch.py).
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
"""Number of weights that a message names."""


def check_weights(
    sent: Mapping[str, int], received: Mapping[str, int], engine: str, version: int, job: ResolvedJob
) -> None:
    """Compare the trainer's and an engine process's checksums. Raises: RunError where they differ."""
    missing = [name for name in sent if name not in received]
    different = [name for name in sent if name in received and received[name] != sent[name]]
    if not (missing or different):
        return
    if missing:
        what = f"{engine} received {len(sent) - len(missing)} of {len(sent)} weights: not {_join_names(missing)}"
    else:
        first = different[0]
        what = (
            f"{engine} received {len(different)} of {len(sent)} weights with other values: {_join_names(different)}; "
            f"the checksum of the first is {as_hex(received[first])}, the trainer's {as_hex(sent[first])}"
        )
    raise mismatch_error(what, version, job)


def check_engine(report: VerificationReport, engine: str, version: int, job: ResolvedJob) -> None:
    """Raises: RunError where an engine's parameters differ from the trainer's weights after loading."""
    if report.different:
        what = (
            f"{engine} does not hold the trainer's weights: {len(report.different)} of its "
            f"{report.num_compared} parameters differ after loading: {_join_names(list(report.different))}"
        )
    elif report.untaken:
        what = (
            f"{engine} has no parameter for {len(report.untaken)} of the trainer's weights: "
            f"vLLM did not load {_join_names(list(report.untaken))}"
        )
    elif report.kept_back:
        what = (
            f"{engine} reads {len(report.kept_back)} weights after their memory may have been overwritten: "
            f"vLLM defers loading {_join_names(list(report.kept_back))} while later packets arrive"
        )
    else:
        return
    raise RunError(
        what,
        where=f"weight sync, version {version}, compared after loading",
        rule="every parameter of an engine holds the trainer's weights, bit for bit",
        way_out=f"{_other_transport(job)}; if that fails too, vLLM loads this model wrongly: report the run folder",
    )


def mismatch_error(what: str, version: int, job: ResolvedJob) -> RunError:
    return RunError(
        what,
        where=f"weight sync, version {version}",
        rule="every weight arrives with the trainer's checksum",
        way_out=f"the update is sent once more automatically; if that fails too, {_other_transport(job)}",
    )


def check_fresh(is_behind: bool, version: int, sampled: set[int], step: int) -> None:
    """Check that a synchronous step's tokens were sampled from the current weights. Raises: RunError where not.

    is_behind: whether the trainer has taken optimizer steps since the last weight sync. sampled: versions of the
    tokens.
    """
    if is_behind:
        what = f"the policy was trained after version {version} was sent to the engines, and not sent again"
    elif sampled - {version}:
        what = f"rollouts were sampled from version {min(sampled - {version})}, the trainer's weights are {version}"
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
