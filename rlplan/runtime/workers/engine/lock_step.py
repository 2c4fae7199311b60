"""Lock step: the ranks of one tensor-parallel engine take the same requests into the same steps.

Each rank has its own scheduler, and schedulers agree only if they see the same requests before the same step. So rank 0
decides and sends every order to the other ranks, in sequence, through the group's rendezvous store.
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
"""Longest single wait for the next order. `stop` is noticed only between waits, and an idle engine gets no orders."""


def join_ranks(rank: int, world_size: int, address: tuple[str, int], timeout: timedelta, listener: int | None) -> Any:
    """Join the other ranks of an engine in a gloo group and return the store. listener: rank 0's listening socket."""
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def join_single_rank() -> None:
    """Create a group of one rank in memory: vLLM would otherwise open a store that listens on every interface."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def name_memory_by_port(port: int) -> Iterator[None]:
    """Context in which vLLM names the shared memory of an engine's ranks by their rendezvous port.

    vLLM 0.32 takes the name from the text after the last colon of the init method. `env://` has none, so two engines
    of a host, or a killed engine and its successor, would share a name. The file is unlinked once all ranks have mapped
    it.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Executor

    original = Executor._distributed_args

    def distributed_args(executor: Any) -> tuple[str, int, int]:
        _, rank, local_rank = original(executor)
        return f"tcp://:{port}", rank, local_rank

    Executor._distributed_args = distributed_args
    try:
        yield
    finally:
        Executor._distributed_args = original
    dist.barrier()  # all ranks have mapped the memory before its name is removed
    for path in Path("/dev/shm").glob(f"{port}-*-cpushm_{dist.get_rank()}"):
        path.unlink(missing_ok=True)


class Leader:
    """Rank 0's side: sends orders."""

    def __init__(self, store: Any, num_followers: int) -> None:
        self._store, self._num_followers, self._count = store, num_followers, 0

    def send_order(self, order: dict[str, Any]) -> None:
        text = json.dumps(order)
        # Each follower has keys of its own and deletes them, so that the store does not grow with the run.
        for follower in range(1, self._num_followers + 1):
            self._store.set(f"rlplan/{follower}/{self._count}", text)
        self._count += 1


class Follower:
    """Another rank's side: a thread that receives orders and executes them with `obey`, until `stop`."""

    def __init__(self, rank: int, address: tuple[str, int], obey: Callable[[dict[str, Any]], None]) -> None:
        self._rank, self._obey, self._is_over = rank, obey, threading.Event()
        # A separate connection: a store answers one request at a time, and this one blocks.
        self._store = dist.TCPStore(*address, is_master=False, timeout=POLL)
        self._thread = threading.Thread(target=self._follow_orders, name="lock step", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()

    def _follow_orders(self) -> None:
        count = 0
        while not self._is_over.is_set():
            key = f"rlplan/{self._rank}/{count}"
            try:
                text = self._store.get(key)
            except dist.DistStoreError:
                continue  # no order arrived within POLL
            except (RuntimeError, ConnectionError):
                return  # rank 0 has ended, and the store with it
            self._store.delete_key(key)
            self._obey(json.loads(text))
            count += 1
