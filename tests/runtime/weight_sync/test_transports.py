"""A channel delivers what was sent, bit for bit, through memory that is used again and again."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplan.errors import RunError
from rlplan.memory.weight_sync.packets import Packet, arena_bytes, plan_packets
from rlplan.runtime.processes.machine_speed import scale_seconds
from rlplan.runtime.weight_sync.channel import Encoding, Endpoint, Update
from rlplan.runtime.weight_sync.checksums import checksum_files, checksum_tensors
from rlplan.runtime.weight_sync.contents.delta import SentWeights
from rlplan.runtime.weight_sync.contents.full import view_entries
from rlplan.runtime.weight_sync.receiver import PolicyReceiver
from rlplan.runtime.weight_sync.sender import PolicySender
from rlplan.runtime.weight_sync.source import WeightSource
from rlplan.runtime.weight_sync.transports.arena import SHARED_FOLDER, create_arena
from rlplan.spec.model import Parameter
from rlplan.units import GIB
from rlplan.vocabulary import Transport
from tests.factories import make_model
from tests.runtime.device.host_device import HostDevice, using

MODEL = make_model()
TIMEOUT_S = scale_seconds(20.0)
HOST_TRANSPORTS = (Transport.SHARED_MEMORY, Transport.GLOO, Transport.DISK, Transport.CUDA_IPC)
"""Those of one host; CUDA's over the device layer's stand-in."""


@pytest.fixture(autouse=True)
def a_device() -> Iterator[None]:
    with using(HostDevice(GIB)):
        yield


class Weights(torch.nn.Module):
    """A module with the factory model's parameters, by their names."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.whole = {p.name: torch.randn(p.shape, generator=generator).to(dtype) for p in MODEL.parameters}

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, torch.nn.Parameter]]:  # type: ignore[override]
        yield from ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in self.whole.items())


class Channel:
    """A sender and readers in threads of one process."""

    def __init__(
        self,
        transport: Transport,
        bucket_bytes: int,
        dtype: torch.dtype,
        num_readers: int,
        folder: Path,
        sends_deltas: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.packets = plan_packets(MODEL.parameters, dtype.itemsize, bucket_bytes)
        self.sender = PolicySender(self.packets, dtype, sends_deltas=sends_deltas)
        self.receivers = [
            PolicyReceiver(self.packets, dtype, reader, takes_deltas=sends_deltas) for reader in range(num_readers)
        ]
        name = str(dtype).removeprefix("torch.")
        endpoint = Endpoint(transport, num_readers, dtype=name, path=str(folder / "sync"), timeout_s=timeout_s)
        self.open(endpoint)

    def open(self, endpoint: Endpoint) -> None:
        offered = self.sender.offer(endpoint)
        calls = [lambda: self.sender.connect(offered)]
        calls += [lambda receiver=receiver: receiver.connect(offered) for receiver in self.receivers]
        together(calls)

    def update(self, weights: Weights, update: Update) -> list[dict[str, torch.Tensor]]:
        """Send; gives what each reader was fed."""
        fed: list[dict[str, torch.Tensor]] = [{} for _ in self.receivers]

        def receive(reader: int) -> None:
            for name, tensor in self.receivers[reader].tensors(update):
                fed[reader][name] = tensor.clone()

        def send() -> None:
            self.sent = self.sender.send(WeightSource(weights), update)

        together([send, *[lambda reader=reader: receive(reader) for reader in range(len(fed))]])
        return fed

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


def together(calls: list) -> None:  # type: ignore[type-arg]
    """Run calls at once; the first error is raised when all have ended."""
    errors: list[BaseException] = []

    def run(call) -> None:  # type: ignore[no-untyped-def]
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("transport", [*HOST_TRANSPORTS, Transport.NCCL])
@pytest.mark.parametrize(("bucket_bytes", "num_readers"), [(1, 1), (4000, 2), (1 << 30, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_arrives_bit_for_bit_and_in_order(
    transport: Transport, bucket_bytes: int, num_readers: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    channel = Channel(transport, bucket_bytes, dtype, num_readers, tmp_path)
    for serial in (1, 2, 3):
        weights = Weights(serial, dtype)
        for fed in channel.update(weights, Update(serial, serial, True, TIMEOUT_S)):
            assert list(fed) == list(weights.whole)
            assert all(torch.equal(fed[name], tensor) for name, tensor in weights.whole.items())
    channel.close()
    channel.close()


def test_an_arena_is_never_laid_over_another(tmp_path: Path) -> None:
    path = Path(SHARED_FOLDER) / f"rlplan-test-{tmp_path.name}"
    create_arena(str(path), 4096)
    try:
        with pytest.raises(FileExistsError):
            create_arena(str(path), 4096)
    finally:
        path.unlink()


def own_arenas() -> set[Path]:
    return set(Path(SHARED_FOLDER).glob(f"rlplan-{os.getpid()}-*"))


def test_the_arena_is_as_large_as_the_memory_model_says_and_has_no_name_once_it_is_used(tmp_path: Path) -> None:
    before = own_arenas()
    channel = Channel(Transport.SHARED_MEMORY, 4000, torch.float32, 1, tmp_path)
    assert channel.sender.num_bytes == channel.receivers[0].num_bytes == arena_bytes(channel.packets)
    assert own_arenas() > before
    channel.update(Weights(0, torch.float32), Update(1, 1, True, TIMEOUT_S))
    assert own_arenas() == before
    channel.close()


def _receive(channel: Channel, update: Update) -> None:
    for _ in channel.receivers[0].tensors(update):
        pass


def _damage(channel: Channel, what: str, packet: Packet) -> None:
    """Change what the next publishing of a packet says or holds."""
    outlet = channel.sender.outlet
    assert outlet is not None
    publish = outlet.publish

    def damage_header(header):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        if header.index == 1:
            if what == "a flipped bit":
                outlet.buffer(1)[100] ^= 1
            elif what == "a truncated packet":
                header = replace(header, num_bytes=header.num_bytes - 64)
            else:
                header = replace(header, version=header.version + 1)
        publish(header)

    outlet.publish = damage_header  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["a flipped bit", "a truncated packet", "another version's packet"])
@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_what_is_damaged_fails_and_a_full_update_over_a_new_channel_is_right(
    what: str, transport: Transport, tmp_path: Path
) -> None:
    channel = Channel(transport, 1, torch.float32, 1, tmp_path)
    _damage(channel, what, channel.packets[1])
    weights = Weights(0, torch.float32)
    with pytest.raises(RunError, match=r"packet|aborted|closed|end of the update"):
        channel.update(weights, Update(1, 1, True, TIMEOUT_S))
    channel.open(Endpoint(transport, 1, path=str(tmp_path / "sync"), timeout_s=TIMEOUT_S))
    (fed,) = channel.update(weights, Update(1, 1, True, TIMEOUT_S))
    assert all(torch.equal(fed[name], tensor) for name, tensor in weights.whole.items())
    channel.close()


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_a_reader_that_is_gone_fails_the_update_of_the_other_side_or_at_least_its_own(
    transport: Transport, tmp_path: Path
) -> None:
    channel = Channel(transport, 1, torch.float32, 1, tmp_path, timeout_s=scale_seconds(2.0))
    inlet = channel.receivers[0].inlet
    assert inlet is not None
    inlet.begin(Update(1, 1, True, 1.0))
    inlet.abort()
    if transport is not Transport.DISK:  # files wait for nobody
        with pytest.raises(RunError):
            channel.sender.send(WeightSource(Weights(0, torch.float32)), Update(1, 1, True, 1.0))
    with pytest.raises(RunError):
        _receive(channel, Update(1, 1, True, 1.0))
    channel.close()


def test_files_of_an_update_are_safetensors_with_every_weight_by_name_and_go_with_the_next(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    channel = Channel(Transport.DISK, 4000, torch.bfloat16, 1, tmp_path)
    for version in (1, 2):
        weights = Weights(version, torch.bfloat16)
        channel.update(weights, Update(version, version, True, TIMEOUT_S))
        (folder,) = (tmp_path / "sync").glob("version-*")
        assert folder.name.startswith(f"version-00000{version}")
        read = {name: tensor for file in sorted(folder.iterdir()) for name, tensor in load_file(file).items()}
        assert all(torch.equal(read[name], tensor) for name, tensor in weights.whole.items())
    channel.close()
    assert not (tmp_path / "sync").exists()


def _change_elements(weights: Weights, share: float, seed: int) -> Weights:
    """The same weights, with a share of their elements drawn anew."""
    other = Weights(seed, next(iter(weights.whole.values())).dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.whole.items():
        where = torch.rand(tensor.shape, generator=generator) < share
        other.whole[name] = torch.where(where, other.whole[name], tensor)
    return other


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_deltas_the_readers_hold_what_a_full_update_would_have_brought(
    transport: Transport, dtype: torch.dtype, tmp_path: Path
) -> None:
    channel = Channel(transport, 4000, dtype, 2, tmp_path, sends_deltas=True)
    weights = Weights(0, dtype)
    stored: dict[str, torch.Tensor] = {}
    for serial, share in enumerate((1.0, 0.01, 0.0, 0.3, 1.0, 0.002), start=1):
        weights = _change_elements(weights, share, serial)
        fed, other = channel.update(weights, Update(serial, serial, serial == 1, TIMEOUT_S))
        assert fed.keys() == other.keys()
        assert (not fed) == (share == 0.0)
        stored |= fed
        assert all(torch.equal(stored[name], tensor) for name, tensor in weights.whole.items())
        for receiver in channel.receivers:
            assert receiver.report.checksums == channel.sent.checksums == checksum_tensors(weights.whole.items())
    channel.close()


def test_a_checksum_is_that_of_the_weight_in_the_engine_s_type_and_sees_one_changed_bit(tmp_path: Path) -> None:
    channel = Channel(Transport.SHARED_MEMORY, 4000, torch.bfloat16, 1, tmp_path)
    weights = Weights(0, torch.float32)
    channel.update(weights, Update(1, 1, True, TIMEOUT_S))
    rounded = {name: tensor.bfloat16() for name, tensor in weights.whole.items()}
    assert channel.receivers[0].report.checksums == channel.sent.checksums == checksum_tensors(rounded.items())
    name = next(iter(rounded))
    rounded[name].view(torch.int16)[0, 0] ^= 1
    different = checksum_tensors(rounded.items())
    assert [each for each in different if different[each] != channel.sent.checksums[each]] == [name]
    channel.close()


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 70, (1 << 18) - 1, (1 << 18) + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_is_the_same_wherever_a_weight_lies_and_in_a_file(
    numel: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    flat = torch.randn(numel + 3).to(dtype)
    odd, even = flat[3:], flat[3:].clone()
    save_file({"a": even}, str(tmp_path / "model.safetensors"))
    assert checksum_tensors([("a", odd)]) == checksum_tensors([("a", even)]) == checksum_files(str(tmp_path))
    if numel:
        even[-1] += 1
        assert checksum_tensors([("a", odd)]) != checksum_tensors([("a", even)])


@given(
    st.integers(1, 5000),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1 << 20),
)
def test_any_change_is_coded_bit_for_bit_within_the_packet_s_bytes(
    numel: int, share: float, dtype: torch.dtype, seed: int
) -> None:
    parameters = [Parameter("model.layers.0.a.weight", (numel,)), Parameter("model.layers.0.b.weight", (3,))]
    packets = plan_packets(parameters, dtype.itemsize, 1 << 30)
    ours, theirs = SentWeights(packets, dtype), SentWeights(packets, dtype)
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.empty(packets[0].bucket.num_bytes, dtype=torch.uint8)
    old = [(p.name, torch.randn(p.shape, generator=generator).to(dtype)) for p in parameters]
    ours.put(0, buffer, old)
    theirs.take(0, buffer)
    new = []
    for name, tensor in old:
        where = torch.rand(tensor.shape, generator=generator) < share
        new.append((name, torch.where(where, -tensor, tensor)))
    encoding, size = ours.encode(0, buffer, new)
    assert size <= buffer.numel()
    theirs.take(0, buffer) if encoding == Encoding.FULL else theirs.apply(0, buffer[:size])
    for (name, tensor), (_, stored) in zip(
        new, view_entries(theirs.copies[0], packets[0].bucket.entries, dtype), strict=True
    ):
        assert torch.equal(tensor, stored), name


class OnGpu(torch.Tensor):
    """A channel's memory as it is on a GPU: numpy does not reach it."""

    is_cpu = False  # type: ignore[assignment]

    def numpy(self, *_: object, **__: object) -> None:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def cpu(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
def test_changes_go_through_a_gpu_s_memory_as_through_the_host_s(share: float) -> None:
    parameters = [Parameter("model.layers.0.a.weight", (5000,))]
    packets, generator = plan_packets(parameters, 2, 1 << 30), torch.Generator().manual_seed(0)
    ours, theirs = SentWeights(packets, torch.bfloat16), SentWeights(packets, torch.bfloat16)
    there = torch.empty(packets[0].bucket.num_bytes, dtype=torch.uint8).as_subclass(OnGpu)  # type: ignore[attr-defined]
    old = torch.randn(5000, generator=generator).to(torch.bfloat16)
    ours.put(0, there, [("model.layers.0.a.weight", old)])
    theirs.take(0, there)
    new = torch.where(torch.rand(5000, generator=generator) < share, -old, old)
    encoding, size = ours.encode(0, there, [("model.layers.0.a.weight", new)])
    assert (encoding == Encoding.FULL) is (share == 1.0)
    theirs.take(0, there) if encoding == Encoding.FULL else theirs.apply(0, there[:size])
    ((_, stored),) = view_entries(theirs.copies[0], packets[0].bucket.entries, torch.bfloat16)
    assert torch.equal(stored, new)


def test_a_delta_over_another_base_is_refused(tmp_path: Path) -> None:
    channel = Channel(Transport.SHARED_MEMORY, 4000, torch.float32, 1, tmp_path, sends_deltas=True)
    weights = Weights(0, torch.float32)
    channel.update(weights, Update(1, 1, True, TIMEOUT_S))
    stored = channel.receivers[0].held
    assert stored is not None
    stored.serial = 0
    with pytest.raises(RunError, match=r"a delta to update 1, which this process does not have|aborted"):
        channel.update(_change_elements(weights, 0.1, 1), Update(2, 2, False, TIMEOUT_S))
    channel.close()


def test_who_waits_for_a_side_that_does_not_answer_gives_up_in_time(tmp_path: Path) -> None:
    channel = Channel(Transport.SHARED_MEMORY, 1, torch.float32, 1, tmp_path)
    with pytest.raises(RunError, match=r"within 0\.2 s"):
        _receive(channel, Update(1, 1, True, 0.2))
    with pytest.raises(RunError, match=r"aborted update 1"):
        channel.sender.send(WeightSource(Weights(0, torch.float32)), Update(1, 1, True, 5.0))
    with pytest.raises(RunError, match=r"reading of packet \d did not happen within 0\.2 s"):
        channel.sender.send(WeightSource(Weights(0, torch.float32)), Update(2, 1, True, 0.2))
    channel.close()
