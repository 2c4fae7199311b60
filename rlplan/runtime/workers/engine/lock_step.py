"""Lock step: the ranks of one tensor-parallel engine take the same requests into the same steps.

Each rank has a scheduler of its own, and they agree only when they see the same requests before the same step. So
rank 0 decides, and says every thing that it does to the others, in order, through the store at which they met.
In: orders as JSON-able dictionaries. Out: the same orders, in the same order, on every other rank.
Left out: what an order means (rollout_engine.py).
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

POLL = timedelta(seconds=20)
"""A wait for the next order is cut into pieces of this length; an idle engine hears nothing for long."""


def join(rank: int, world_size: int, address: tuple[str, int], timeout: timedelta, listener: int | None) -> Any:
    """Meet the other ranks of an engine in a gloo group; gives the store. listener: rank 0's listening socket."""
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def join_alone() -> None:
    """A group of one rank, met in memory: vLLM would open a store for it that listens on every interface."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def named_by_port(port: int) -> Iterator[None]:
    """Inside the block vLLM names the shared memory of an engine's ranks by the port where they meet.

    vLLM 0.32 takes what stands after the last colon of how ranks meet; `env://` has none, so that any two engines of a
    host, or one that was killed and the next one, would share a name. Once all ranks have it mapped, the name goes.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    original = Executor._distributed_args

    def meeting(executor: Any) -> tuple[str, int, int]:
        _, rank, local_rank = original(executor)
        return f"tcp://:{port}", rank, local_rank

    Executor._distributed_args = meeting
    try:
        yield
    finally:
        Executor._distributed_args = original
    dist.barrier()
    for left in Path("/dev/shm").glob(f"{port}-*-cpushm_{dist.get_rank()}"):
        left.unlink(missing_ok=True)


class Leader:
    """Rank 0's side."""

    def __init__(self, store: Any, num_followers: int) -> None:
        self._store, self._num_followers, self._count = store, num_followers, 0

    def tell(self, order: dict[str, Any]) -> None:
        text = json.dumps(order)
        for follower in range(1, self._num_followers + 1):
            self._store.set(f"rlplan/{follower}/{self._count}", text)
        self._count += 1


class Follower:
    """Another rank's side: a thread that hears orders and hands them on, until `stop`."""

    def __init__(self, rank: int, address: tuple[str, int], obey: Callable[[dict[str, Any]], None]) -> None:
        self._rank, self._obey, self._is_over = rank, obey, threading.Event()
        # A connection of its own: a store answers one question at a time, and this one waits.
        self._store = dist.TCPStore(*address, is_master=False, timeout=POLL)
        self._thread = threading.Thread(target=self._listen, name="lock step", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()

    def _listen(self) -> None:
        count = 0
        while not self._is_over.is_set():
            key = f"rlplan/{self._rank}/{count}"
            try:
                text = self._store.get(key)
            except dist.DistStoreError:
                continue  # nothing was said for so long
            except (RuntimeError, ConnectionError):
                return  # rank 0 is gone, and with it the store
            self._store.delete_key(key)
            self._obey(json.loads(text))
            count += 1
