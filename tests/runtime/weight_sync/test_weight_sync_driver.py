"""The driver's side of weight sync, with a trainer and engines in threads: what is lost or changed on the way shows.

The trainer's and the engines' sides are the real ones, without DeepSpeed and vLLM around them: a small transformer's
weights go out, and each engine's process keeps what it is fed.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplan.emit.execution import execution_spec
from rlplan.errors import RunError
from rlplan.memory.weight_sync.packets import plan_policy_packets
from rlplan.runtime.driver.switches import Switches
from rlplan.runtime.learning.logprob_mismatch import LIMITS
from rlplan.runtime.models.adapters import AdapterWeights, add_adapters
from rlplan.runtime.models.start_checkpoint import load_language_model
from rlplan.runtime.weight_sync.channel import Endpoint, Header, Update, VerificationReport
from rlplan.runtime.weight_sync.receiver import PolicyReceiver
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.weight_sync.weight_sync_driver import WeightSync
from rlplan.runtime.weight_sync.weight_verification import check_fresh
from rlplan.vocabulary import ActionKind, Dtype, SyncContent
from tests.factories import EXAMPLES, make_plan
from tests.repository.at_night import mark_nightly

SORTER = str(EXAMPLES / "models" / "sorter")
TRAINER, ENGINES = "policy_trainer/0", ("rollout_engine/0", "rollout_engine/1")
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
Fault = Callable[[Header, torch.Tensor], None]


def build_policy(job: Any) -> tuple[Any, WeightSource]:
    """The model, with adapters where they alone are sent, and what is sent of it."""
    model = load_language_model(SORTER)
    if job.placement.sync_content is not SyncContent.ADAPTER:
        return model, WeightSource(model)
    add_adapters(model, job)
    return model, AdapterWeights(model)


class Trainer:
    """A trainer process's answers. fault: called with each packet before it is sent."""

    def __init__(self, job: Any) -> None:
        self.model, self.source = build_policy(job)
        self.fault: Fault | None = None
        is_delta = job.placement.sync_content is SyncContent.DELTA
        self.sender = PolicySender(plan_policy_packets(job, job.load_model()), torch.float32, sends_deltas=is_delta)

    def offer_channel(self, endpoint: Endpoint) -> Endpoint:
        offered = self.sender.offer(endpoint)
        outlet = self.sender.outlet
        assert outlet is not None
        publish = outlet.publish

        def publish_faulty(header: Header) -> None:
            if self.fault is not None:
                self.fault(header, outlet.buffer(header.index)[: header.num_bytes])
            publish(header)

        outlet.publish = publish_faulty  # type: ignore[method-assign]
        return offered

    def open_channel(self, endpoint: Endpoint) -> None:
        self.sender.connect(endpoint)

    def send_weights(self, update: Update) -> Any:
        return self.sender.send(self.source, update)

    def save(self, folder: str) -> Any:
        from safetensors.torch import save_file

        from rlplan.runtime.weight_sync.checksums import checksum_tensors

        Path(folder).mkdir(parents=True)
        weights = {"layers.0.up.weight": torch.ones(4, 8), "layers.0.down.weight": torch.zeros(8, 4)}
        save_file(weights, f"{folder}/model.safetensors")
        return checksum_tensors(weights.items())

    def step(self) -> None:
        """Move every weight that is sent a little."""
        with torch.no_grad():
            for _, parameter in self.source:
                parameter.mul_(1.01).add_(0.001)


class Engine:
    """An engine process's answers. fed: the model with the received weights. damage: done to a folder."""

    def __init__(self, job: Any) -> None:
        self.model, self.held = build_policy(job)
        is_delta = job.placement.sync_content is SyncContent.DELTA
        self.packets = plan_policy_packets(job, job.load_model())
        self.takes_deltas, self.receiver = is_delta, None
        self.damage: Callable[[Path], None] = lambda folder: None

    def open_channel(self, endpoint: Endpoint, reader: int) -> None:
        if self.receiver is None:
            self.receiver = PolicyReceiver(self.packets, torch.float32, reader, takes_deltas=self.takes_deltas)  # type: ignore[assignment]
        self.receiver.connect(endpoint)  # type: ignore[attr-defined]

    def receive_weights(self, update: Update) -> Any:
        with torch.no_grad():
            for name, tensor in self.receiver.tensors(update):  # type: ignore[attr-defined]
                self.held.read(name).copy_(tensor)
        return self.sync_report()

    def verify_weights(self, update: Update) -> VerificationReport:
        weights = [(name, tensor.clone()) for name, tensor in self.receiver.tensors(update)]  # type: ignore[attr-defined]
        different = tuple(name for name, tensor in weights if not torch.equal(self.held.read(name), tensor))
        return VerificationReport(len(weights), different)

    def sync_report(self) -> Any:
        return self.receiver.report  # type: ignore[attr-defined]

    def file_checksums(self, folder: str) -> Any:
        from rlplan.runtime.weight_sync.checksums import checksum_files

        with tempfile.TemporaryDirectory() as copy_views:  # the other engine may be reading the folder
            copy = shutil.copytree(folder, Path(copy_views) / "copy")
            self.damage(copy)
            return checksum_files(str(copy))


class ForgetfulEngine(Engine):
    """Receives everything and leaves one weight as it was, as a loader that skips it."""

    def receive_weights(self, update: Update) -> Any:
        name = next(name for name, _ in self.held)
        before = self.held.read(name).clone()
        super().receive_weights(update)
        with torch.no_grad():
            self.held.read(name).copy_(before)
        return self.sync_report()


class BufferingEngine(Engine):
    """Loads nothing before the update ends, as vLLM's reload may; packets that are released earlier are copied."""

    def receive_weights(self, update: Update) -> Any:
        kept: dict[str, torch.Tensor] = {}

        def copy_views(memory: torch.Tensor) -> None:
            for name, tensor in kept.items():
                if tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                    kept[name] = tensor.clone()

        for name, tensor in self.receiver.tensors(update, copy_views):  # type: ignore[attr-defined]
            kept[name] = tensor
        self.kept = kept
        return self.sync_report()


class WorkerGroup:
    """Processes in threads."""

    def __init__(self, folder: Path, workers: dict[str, Any]) -> None:
        self.workers, self.log_folder = workers, folder / "logs"
        self.log_folder.mkdir()
        self.addresses = dict.fromkeys(workers, "127.0.0.1")

    def submit(self, process: str, method: str, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
        answer: list[Any] = []

        def work() -> None:
            try:
                answer.append(getattr(self.workers[process], method)(*arguments))
            except Exception as error:
                answer.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        return thread, answer

    perform = submit

    def gather(self, calls: Sequence[tuple[threading.Thread, list[Any]]], timeout_s: float) -> list[Any]:
        for thread, _ in calls:
            thread.join(timeout_s)
        answers = [answer[0] for _, answer in calls]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def has_ended(self, call: tuple[threading.Thread, list[Any]], timeout_s: float) -> bool:
        call[0].join(timeout_s)
        return not call[0].is_alive()

    def gather_measured(self, calls: Any, timeout_s: float) -> tuple[list[Any], list[Any]]:
        return self.gather(calls, timeout_s), []


class Setup:
    """A handover between them."""

    def __init__(self, folder: Path, transport: str, content: str) -> None:
        plan = make_plan(
            **{
                "placement.placement": "disaggregated",
                "placement.num_generation_devices": 2,
                "placement.transport": transport,
                "placement.sync_content": content,
                "placement.sync_bucket": 1_000_000,
                "rollout.num_engines": 2,
                "hardware.num_devices": 3,
                "algorithm.kl_coef": 0.0,
                "limits.action_timeout_s": 20.0,
                **({"training.lora": {"rank": 4}} if content == "adapter" else {}),
            }
        )
        self.spec = execution_spec(plan)
        self.trainer, self.engines = Trainer(plan.job), [Engine(plan.job) for _ in ENGINES]
        self.worker_group = WorkerGroup(
            folder, {TRAINER: self.trainer, **dict(zip(ENGINES, self.engines, strict=True))}
        )
        self.weight_sync = WeightSync(self.spec, self.worker_group)  # type: ignore[arg-type]
        self.action = next(a for a in self.spec.schedule.step if a.kind is ActionKind.SYNC_WEIGHTS)

    def sync(self) -> None:
        self.weight_sync.sync(self.action)

    def difference(self) -> float:
        """The largest, in log-prob, between the trainer's model and the engines'."""
        with torch.no_grad():
            expected, *fed = (
                each.model(input_ids=TOKENS, position_ids=torch.arange(8)[None], sequence_lens=(8,)).logits.log_softmax(
                    -1
                )
                for each in (self.trainer, *self.engines)
            )
        return max(float((expected - each).abs().max()) for each in fed)

    def close(self) -> None:
        self.trainer.sender.close()
        for engine in self.engines:
            if engine.receiver is not None:
                engine.receiver.close()
        self.weight_sync.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str, str], Setup]]:
    setups: list[Setup] = []

    def begin(transport: str, content: str) -> Setup:
        setups.append(Setup(tmp_path, transport, content))
        return setups[-1]

    yield begin
    for each in setups:
        each.close()


def _entry(setup: Setup, header: Header) -> Any:
    """A weight of a packet that is not its last: a norm's, which is small."""
    return setup.trainer.sender.packets[header.index].bucket.entries[0]


def _entry_name(setup: Setup) -> str:
    return str(setup.trainer.sender.packets[1].bucket.entries[0].name)


def _alter(setup: Setup, header: Header, payload: torch.Tensor) -> None:
    """The lowest bit of one element."""
    if header.index == 1:
        payload[_entry(setup, header).offset] ^= 1


def _lose(setup: Setup, header: Header, payload: torch.Tensor) -> None:
    """One tensor is not what it was: its place was never written."""
    if header.index == 1:
        payload[_entry(setup, header).offset :][:64] = 0


@pytest.mark.parametrize(
    ("transport", "content", "fault"),
    mark_nightly(
        [
            (*way, fault)
            for way in (("shared_memory", "full"), ("gloo", "full"), ("disk", "full"), ("gloo", "adapter"))
            for fault in (_alter, _lose)
        ],
        but=(("shared_memory", "full", _alter), ("gloo", "adapter", _lose)),
    ),
)
def test_a_transport_that_alters_or_loses_one_tensor_ends_the_sync_by_its_checksum(
    make: Callable[[str, str], Setup], transport: str, content: str, fault: Any
) -> None:
    setup = make(transport, content)
    setup.trainer.step()
    setup.sync()
    assert setup.difference() < 1e-5
    setup.trainer.fault = lambda header, payload: fault(setup, header, payload)
    with pytest.raises(RunError, match=r"rollout_engine/\d: packet 1 \(model.* arrived with checksum") as caught:
        setup.sync()
    assert setup.weight_sync.num_resends == 1
    assert caught.value.rule == "every weight arrives with the trainer's checksum"
    other_way = "placement.transport=" if content == "full" else "placement.sync_content=full"
    assert other_way in caught.value.way_out


def test_one_altered_bit_is_noticed_though_log_probs_hardly_differ(make: Callable[[str, str], Setup]) -> None:
    setup = make("shared_memory", "full")

    def alter(header: Header, payload: torch.Tensor) -> None:
        _alter(setup, header, payload)

    setup.trainer.fault = alter
    with pytest.raises(RunError, match="arrived with checksum"):
        setup.sync()
    name = _entry_name(setup)
    with torch.no_grad():
        for engine in setup.engines:
            for parameter, expected in zip(engine.model.parameters(), setup.trainer.model.parameters(), strict=True):
                parameter.copy_(expected)
            dict(engine.model.named_parameters())[name].view(torch.int32).view(-1)[0] ^= 1
    assert setup.difference() < LIMITS[Dtype.FLOAT32].mean, "no check of log-probs would have noticed"


def test_weights_that_a_delta_was_laid_over_wrongly_are_noticed_and_sent_anew(
    make: Callable[[str, str], Setup],
) -> None:
    setup = make("shared_memory", "delta")
    setup.sync()
    setup.engines[1].receiver.held.copies[1][0] ^= 1  # type: ignore[attr-defined]
    setup.sync()
    assert setup.weight_sync.num_resends == 1
    setup.sync()
    assert setup.weight_sync.num_resends == 1
    assert setup.difference() < 1e-5


@pytest.mark.parametrize("content", ["full", "delta", "adapter"])
def test_an_engine_that_was_started_again_is_compared_with_the_trainer_again(
    make: Callable[[str, str], Setup], content: str
) -> None:
    setup = make("shared_memory", content)
    setup.sync()
    assert setup.weight_sync.verified
    setup.trainer.step()
    setup.worker_group.workers[ENGINES[1]] = setup.engines[1] = ForgetfulEngine(setup.spec.job)
    setup.weight_sync.forget()
    with pytest.raises(RunError, match=r"rollout_engine/1 does not hold the trainer's weights: 1 of its "):
        setup.weight_sync.resend()
    assert not setup.weight_sync.verified


@pytest.mark.parametrize("content", ["full", "delta"])
def test_weights_that_an_engine_keeps_until_the_end_are_copied_before_their_packet_is_given_back(
    make: Callable[[str, str], Setup], content: str
) -> None:
    """Several packets, and the next update writes into the memory in which these came."""
    setup = make("shared_memory", content)
    setup.worker_group.workers[ENGINES[0]] = setup.engines[0] = engine = BufferingEngine(setup.spec.job)
    measurements = setup.weight_sync._send(setup.action.processes)
    assert measurements == []
    assert len(engine.packets) > 1
    sent = {name: tensor.clone() for name, tensor in setup.trainer.source}
    first = dict(engine.kept)
    setup.trainer.step()
    setup.weight_sync._send(setup.action.processes)
    assert first.keys() <= sent.keys()
    assert all(torch.equal(tensor, sent[name]) for name, tensor in first.items())


@pytest.mark.parametrize("content", ["full", "delta", "adapter"])
def test_an_engine_that_a_sync_left_out_ends_the_run(make: Callable[[str, str], Setup], content: str) -> None:
    setup = make("disk", content)
    setup.sync()
    setup.trainer.step()
    setup.action = replace(setup.action, processes=(TRAINER, ENGINES[0]))
    with pytest.raises(RunError, match=r"rollout_engine/1 received 0 of \d+ weights: not ") as caught:
        setup.sync()
    assert "version 2" in caught.value.where
    other_way = "placement.transport=gloo" if content == "full" else "placement.sync_content=full"
    assert other_way in caught.value.way_out


def test_an_engine_that_starts_from_files_reads_what_the_trainer_wrote(
    make: Callable[[str, str], Setup], tmp_path: Path
) -> None:
    setup = make("shared_memory", "full")
    switches = Switches(setup.worker_group, tmp_path, setup.spec.job)  # type: ignore[arg-type]
    switches.check_saved(ENGINES, 0)
    switches.saved = tmp_path / "weights"
    switches.checksums = setup.trainer.save(str(switches.saved))
    switches.check_saved(ENGINES, 1)
    setup.engines[0].damage = _flip_last_byte
    with pytest.raises(RunError, match=r"rollout_engine/0 received .* weights with other values"):
        switches.check_saved(ENGINES, 1)


def _flip_last_byte(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_rollouts_of_other_weights_than_those_that_are_trained_end_the_run() -> None:
    check_fresh(False, 3, {3}, 4)
    check_fresh(False, 3, set(), 4)
    with pytest.raises(RunError, match="trained after version 3 was sent to the engines, and not sent again"):
        check_fresh(True, 3, {3}, 4)
    with pytest.raises(RunError, match="rollouts were sampled from version 2, the trainer's weights are 3") as caught:
        check_fresh(False, 3, {3, 2}, 4)
    assert caught.value.where == "step 4, train_forward_backward"
