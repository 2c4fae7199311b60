"""WeightSync: the driver's side of weight sync: participants, opening of channels, retries, verification.

In: a sync action. Out: measurements, and a summary of the verification. The driver calls each side once per update.
Left out: the data between the sides (sender.py, receiver.py).
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplan.dataflow.schedule import Action
from rlplan.emit.execution import ExecutionSpec
from rlplan.errors import RunError
from rlplan.runtime.cluster.worker_group import Call, WorkerGroup
from rlplan.runtime.fault_tolerance.supervision import LostGroupError, LostProcessError
from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.weight_sync.channel import Endpoint, GivenUpError, Update, VerificationReport
from rlplan.runtime.weight_sync.weight_verification import check_engine, check_weights, mismatch_error
from rlplan.runtime.workers.typed_calls import ENGINE, TRAINER, bind_call
from rlplan.vocabulary import SyncContent

REASON_S = 2.0
"""Seconds to wait for the error of the side that aborted an update, after another side has noticed the abort."""


class WeightSync:
    """Weight sync from the trainer to the engines. version: weight version that the engines hold, 0 at first.

    is_behind: whether the trainer has taken optimizer steps since that version. verified: summary of the engines'
    verification, empty before the first one and after an engine's restart. is_verified: whether further updates need
    no verification.
    """

    def __init__(self, spec: ExecutionSpec, worker_group: WorkerGroup) -> None:
        self.spec, self.worker_group = spec, worker_group
        self.endpoints: list[Endpoint] = []
        self.is_open = self.is_behind = self.is_verified = False
        self.version = self.serial = self.num_resends = 0
        self.verified = ""
        self.trainers = [worker.process for worker in spec.ray.workers if worker.worker == "policy_trainer"]
        self.engines = [worker.process for worker in spec.ray.workers if worker.worker == "rollout_engine"]
        self.channels = self._channels()

    def sync(self, action: Action) -> list[Measurement]:
        """Send the trainer's weights to the engines. A failed update is repeated once, in full, over a new channel.

        Raises: RunError when that fails too; the engines then refuse to generate.
        """
        self.version += 1
        try:
            measurements = self._send(action.processes)
            measurements += self._verify_if_due(action.processes)
            self.is_behind = False
            return measurements
        except LostProcessError:
            self.version -= 1  # the update is repeated once the lost process has been restarted
            raise

    def _send(self, processes: Sequence[str]) -> list[Measurement]:
        measurements = [] if self.is_open else self._open_channels()
        try:
            measurements += self._update(processes, is_full=self.serial == 0)
        except (LostProcessError, LostGroupError):
            raise  # sending again needs the lost process
        except RunError:
            self.num_resends += 1
            measurements += self._send_again(processes)
        return measurements

    def _send_again(self, processes: Sequence[str]) -> list[Measurement]:
        """Send all weights over a new channel.

        Raises: RunError; if a reader found a checksum mismatch, the error names it rather than its consequences.
        """
        try:
            return self._open_channels() + self._update(processes, is_full=True)
        except (LostProcessError, LostGroupError):
            raise
        except RunError:
            engines = [process for process in processes if process in self.engines]
            reports = [self.worker_group.submit(process, *bind_call(ENGINE.sync_report)) for process in engines]
            for process, report in zip(engines, self.worker_group.gather(reports, self._timeout_s), strict=True):
                if report.mismatch:
                    raise mismatch_error(f"{process}: {report.mismatch}", self.version, self.spec.job) from None
            raise

    def forget(self) -> None:
        """Forget the channel after an engine's restart; the next update opens a new one and sends and verifies all."""
        self.is_open, self.is_verified, self.verified = False, False, ""

    def resend(self) -> list[Measurement]:
        """Send the current weights in full to all engines, because one of them was restarted.

        Nothing is sent before the first adapter.
        """
        if self.spec.job.placement.sync_content is SyncContent.ADAPTER and not self.version:
            return []
        processes = (*self.trainers, *self.engines)
        measurements = self._open_channels() + self._update(processes, is_full=True)
        return measurements + self._verify_if_due(processes)

    def close(self) -> None:
        """Remove files of channels on disk or in shared memory, after both sides have ended."""
        for path in (Path(endpoint.path) for endpoint in self.endpoints if endpoint.path):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _channels(self) -> list[tuple[str, list[str]]]:
        """(sender, its readers): the first rank with all engines, or each rank with the engines on its device."""
        if self.spec.job.placement.sync_senders == "one":
            return [(self.trainers[0], self.engines)]
        devices = dict(self.spec.schedule.processes)
        return [
            (sender, [engine for engine in self.engines if devices[engine] == devices[sender]])
            for sender in self.trainers
        ]

    def _open_channels(self) -> list[Measurement]:
        offers, offered = self._run_measured(
            [
                (sender, *bind_call(TRAINER.offer_channel, self._build_endpoint(sender, len(readers))))
                for sender, readers in self.channels
            ]
        )
        self.endpoints = offers
        # All sides connect at the same time, because gloo and NCCL wait in `connect` for every member of their group.
        calls: list[tuple[Any, ...]] = []
        for (sender, readers), offer in zip(self.channels, offers, strict=True):
            calls.append((sender, *bind_call(TRAINER.open_channel, offer)))
            calls += [(engine, *bind_call(ENGINE.open_channel, offer, reader)) for reader, engine in enumerate(readers)]
        measurements = self._run_measured(calls)[1]
        self.is_open, self.serial = True, 0  # update 1 of a channel is a full one: nothing has been sent over it yet
        return offered + measurements

    def _build_endpoint(self, sender: str, num_readers: int) -> Endpoint:
        return Endpoint(
            transport=self.spec.job.sync_transport,
            num_readers=num_readers,
            dtype=self.spec.job.rollout.dtype.value,
            host=self.worker_group.addresses[sender],
            path=str(self.worker_group.log_folder.resolve().parent / "weight_sync"),
            timeout_s=self._timeout_s,
        )

    def _update(self, processes: Sequence[str], *, is_full: bool) -> list[Measurement]:
        self.serial += 1
        update = Update(self.serial, self.version, is_full, self._timeout_s)
        send, receive = bind_call(TRAINER.send_weights, update), bind_call(ENGINE.receive_weights, update)
        calls = [(process, *send) for process in processes if process in self.trainers]
        calls += [(process, *receive) for process in processes if process in self.engines]
        reports, measurements = self._run_measured(calls)
        checksums = {process: report.checksums for (process, *_), report in zip(calls, reports, strict=True) if report}
        for sender, readers in self.channels:
            for reader in readers:
                check_weights(checksums[sender], checksums.get(reader, {}), reader, self.version, self.spec.job)
        return measurements

    def _verify_if_due(self, processes: Sequence[str]) -> list[Measurement]:
        """Verify after the first update of every engine, or after each update. Raises: RunError."""
        is_due = not self.is_verified or self.spec.job.placement.sync_verification == "every"
        return self._verify(processes) if is_due else []

    def _verify(self, processes: Sequence[str]) -> list[Measurement]:
        """Send the weights again, to be compared with the engines' parameters. Raises: RunError where they differ."""
        engines = [process for process in processes if process in self.engines]
        try:
            reports, measurements = self._compare(processes)
        except (LostProcessError, LostGroupError):
            raise
        except RunError:
            self.num_resends += 1
            measurements = self._send_again(processes)
            reports, more = self._compare(processes)
            measurements += more
        for process, report in zip(engines, reports, strict=True):
            check_engine(report, process, self.version, self.spec.job)
        self.is_verified = all(report.is_conclusive for report in reports)
        self.verified = _describe_reports(reports, self.spec.job.placement.sync_content)
        return measurements

    def _compare(self, processes: Sequence[str]) -> tuple[list[VerificationReport], list[Measurement]]:
        """Send an update with the version that the engines hold; return each engine process's comparison."""
        self.serial += 1
        update = Update(self.serial, self.version, True, self._timeout_s, verifies=True)
        send, verify = bind_call(TRAINER.send_weights, update), bind_call(ENGINE.verify_weights, update)
        sends = [(process, *send) for process in processes if process in self.trainers]
        verifications = [(process, *verify) for process in processes if process in self.engines]
        answers, measurements = self._run_measured(sends + verifications)
        return answers[len(sends) :], measurements

    @property
    def _timeout_s(self) -> float:
        """Time limit of an update: half of the driver's, so that an update can be sent once more."""
        return self.spec.job.limits.action_timeout_s / 2

    def _run_measured(self, calls: Sequence[tuple[Any, ...]]) -> tuple[list[Any], list[Measurement]]:
        begun = [self.worker_group.perform(process, method, *arguments) for process, method, *arguments in calls]
        try:
            return self.worker_group.gather_measured(begun, self.spec.job.limits.action_timeout_s)
        except GivenUpError as error:
            raise self._find_cause(begun) or error from None

    def _find_cause(self, begun: Sequence[Call]) -> RunError | None:
        """Error of the side that aborted the update, if the first error came from a side that only noticed it."""
        for call in begun:
            try:
                if self.worker_group.has_ended(call, REASON_S):
                    self.worker_group.gather([call], REASON_S)
            except GivenUpError:
                continue
            except RunError as error:
                return error
        return None


def _describe_reports(reports: Sequence[VerificationReport], content: SyncContent) -> str:
    num_compared = sum(report.num_compared for report in reports)
    left_out = ", ".join(sorted({name for report in reports for name in report.not_compared}))
    if content is SyncContent.ADAPTER:
        words = f"{num_compared} adapter matrices in {len(reports)} engine processes equal the trainer's"
        words += "; not compared: the base, which is not sent"
        return f"{words}, and adapters that cannot be read back from vLLM: {left_out}" if left_out else words
    words = f"{num_compared} parameters of {len(reports)} engine processes hold the trainer's weights"
    return f"{words}; not compared, because vLLM pads them: {left_out}" if left_out else words
