"""CpuHost: what a process of a host without a GPU reaches, when others compute beside it.

In: a CpuProfile. Out: rates of one process, and Costs of bytes, FLOPs and operations. Left out: caches, NUMA, clocks.

Rates of a profile are of all cores together. A process with t threads beside others has t of C cores, less where all
threads together are more than C. Page faults are one process's own: more threads hardly help (2.3 GB/s with one thread,
2.8 with two, measured), other processes do not hurt up to the number of cores.
"""

from dataclasses import dataclass

from rlplan.spec.hardware.profile import ComputeDtype, CpuLatencies, CpuProfile, CpuRates
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.cpu.eager import PassCounts


@dataclass(frozen=True, slots=True)
class CpuHost:
    """Rates of a host, whole. Make one with `host_of`."""

    num_cores: int
    flops_per_s: float
    memory_bytes_per_s: float
    fresh_bytes_per_s: float
    collective_bytes_per_s: float
    disk_bytes_per_s: float
    launch_s: float
    latencies: CpuLatencies

    def share(self, num_threads: int, num_processes: int = 1, num_beside: int = 0) -> "CpuShare":
        """What each of `num_processes` has that compute at once, with as many threads each.

        Counts: min(t, C) / C of the whole, and C / (t n) of that where t n is more than C; of the memory's bytes per
        second its part among n and the `num_beside` others that compute at the same time on cores of their own.
        """
        threads = min(num_threads, self.num_cores)
        return CpuShare(
            self,
            min(threads / self.num_cores, 1 / num_processes),
            min(1.0, self.num_cores / num_processes),
            num_processes,
            num_beside,
        )


@dataclass(frozen=True, slots=True)
class CpuShare:
    """One process's part of a host."""

    host: CpuHost
    cores: float
    """Share of all cores."""
    thread_share: float
    """Share of the time that one thread runs."""
    num_processes: int
    num_beside: int = 0
    """Other processes that read and write memory at the same time."""

    def pass_cost(self, counts: PassCounts) -> Cost:
        """Seconds of a pass: matmuls, weights read, fresh memory, dispatch, one after the other.

        Assumes: nothing overlaps. Matmuls of few rows reach 45 % of the large ones' FLOP/s where weights come from
        the cache, and wait for them where they do not: a sum is nearer than the larger of the two.
        """
        return (
            Cost({Resource.COMPUTE: counts.flops / (self.host.flops_per_s * self.cores)})
            + self.touch_cost(counts.read_bytes)
            + self.fresh_cost(counts.fresh_bytes)
            + Cost({Resource.LATENCY: counts.num_ops * self.host.launch_s / self.thread_share})
        )

    def touch_cost(self, num_bytes: float) -> Cost:
        """Seconds of bytes read or written where they lie."""
        readers = self.num_processes + self.num_beside
        return Cost({Resource.MEMORY: num_bytes * readers / self.host.memory_bytes_per_s})

    def fresh_cost(self, num_bytes: float) -> Cost:
        """Seconds of results in fresh memory: page faults, zeroing, the operation itself, and giving back."""
        return Cost({Resource.HOST: num_bytes / (self.host.fresh_bytes_per_s * self.thread_share)})

    def latency_cost(self, seconds: float, count: float = 1) -> Cost:
        """Seconds of Python and calls, `count` times."""
        return Cost({Resource.LATENCY: seconds * count / self.thread_share})

    def all_reduce_cost(self, num_bytes: float) -> Cost:
        """Seconds of an all-reduce among the processes: each sends 2 (n - 1)/n of the bytes."""
        return self._sent(2 * num_bytes)

    def all_gather_cost(self, num_bytes: float) -> Cost:
        """Seconds of an all-gather of `num_bytes` in all: each sends (n - 1)/n of them."""
        return self._sent(num_bytes)

    def _sent(self, num_bytes: float) -> Cost:
        sent = num_bytes * (self.num_processes - 1) / self.num_processes
        return Cost({Resource.NETWORK: sent / (self.host.collective_bytes_per_s * self.thread_share)})


def host_of(profile: CpuProfile) -> CpuHost | None:
    """The host of a profile; None where a rate or latency is missing, for an unknown is no zero."""
    rates = profile.rates or CpuRates()
    flops = rates.flops_per_s.get(ComputeDtype.FLOAT32)
    cores, memory, fresh = rates.num_cores, rates.memory_bytes_per_s, rates.fresh_memory_bytes_per_s
    sent, disk, launch = rates.collective_bytes_per_s, rates.disk_bytes_per_s, rates.launch
    if not (flops and cores and memory and fresh and sent and disk and launch and profile.latencies):
        return None
    return CpuHost(
        cores.value, flops.value, memory.value, fresh.value, sent.value, disk.value, launch.value, profile.latencies
    )


def when_tasks_end(seconds: list[float], num_cores: int) -> list[float]:
    """When each of several single-threaded tasks ends, started together and sharing the cores evenly.

    >>> when_tasks_end([2.0, 4.0, 6.0], 2)  # three on two cores: 3.0; then two, one core each: 5.0, 7.0
    [3.0, 5.0, 7.0]
    """
    now, done, ends = 0.0, 0.0, {}
    for position, task in enumerate(sorted(range(len(seconds)), key=seconds.__getitem__)):
        now += (seconds[task] - done) * max(1.0, (len(seconds) - position) / num_cores)
        done, ends[task] = seconds[task], now
    return [ends[task] for task in range(len(seconds))]
