"""CpuHost: rates that a process reaches on a host without a GPU while other processes compute; and
seconds that a step waits for rewards from separate processes after its last token.

In: a CpuProfile, a job. Out: rates of one process, and Costs of bytes, FLOPs and operations. Left out: caches, NUMA,
clocks; functions that a user supplies as rewards, the computation of a judged program, every test after the first.

The rates of a profile belong to all cores together. A process with t threads gets t of C cores, or less where the
threads of all processes exceed C. Page faults are limited per process: a second thread hardly helps (2.3 GB/s with one
thread, 2.8 with two, measured), and other processes do not slow them while cores are free.

    n   rollouts of a step
    w   responses judged at the same time, limits.num_reward_workers
    C   cores of the host
    c   core seconds per response, all rewards together
    g   seconds of generation, during which most responses are judged
"""

from dataclasses import dataclass

from rlplan.spec.hardware.profile import ComputeDtype, CpuLatencies, CpuProfile, CpuRates
from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, RewardSpec
from rlplan.spec.resolved import ResolvedJob
from rlplan.timing.cost import Cost, Resource
from rlplan.timing.cpu.eager import PassCounts


@dataclass(frozen=True, slots=True)
class CpuHost:
    """Rates of a whole host. Make one with `read_host`."""

    num_cores: int
    flops_per_s: float
    memory_bytes_per_s: float
    fresh_bytes_per_s: float
    collective_bytes_per_s: float
    disk_bytes_per_s: float
    launch_s: float
    latencies: CpuLatencies

    def share(self, num_threads: int, num_processes: int = 1, num_beside: int = 0) -> "CpuShare":
        """Share of each of `num_processes` that compute at once with `num_threads` each.

        Counts: min(t, C) / C of the host, and C / (t n) of that where t n is more than C. Memory bandwidth is divided
        among the n processes and `num_beside` others that compute on cores of their own.
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
    """Share of a host that one process gets."""

    host: CpuHost
    cores: float
    """Share of all cores."""
    thread_share: float
    """Fraction of the time that one thread runs."""
    num_processes: int
    num_beside: int = 0
    """Other processes that read and write memory at the same time."""

    def pass_cost(self, counts: PassCounts) -> Cost:
        """Seconds of a pass: matmuls, weights read, fresh memory and dispatch, one after the other.

        Assumes: nothing overlaps. Small matmuls reach 45 % of the FLOP/s of large ones with cached weights, and wait
        for memory otherwise. The sum of both is closer to measurements than the larger one.
        """
        return (
            Cost({Resource.COMPUTE: counts.flops / (self.host.flops_per_s * self.cores)})
            + self.touch_cost(counts.read_bytes)
            + self.fresh_cost(counts.fresh_bytes)
            + Cost({Resource.LATENCY: counts.num_ops * self.host.launch_s / self.thread_share})
        )

    def touch_cost(self, num_bytes: float) -> Cost:
        """Seconds to read or write bytes in place."""
        readers = self.num_processes + self.num_beside
        return Cost({Resource.MEMORY: num_bytes * readers / self.host.memory_bytes_per_s})

    def fresh_cost(self, num_bytes: float) -> Cost:
        """Seconds of results in fresh memory: page faults, zeroing, the operation itself, and unmapping."""
        return Cost({Resource.HOST: num_bytes / (self.host.fresh_bytes_per_s * self.thread_share)})

    def latency_cost(self, seconds: float, count: float = 1) -> Cost:
        """Seconds of Python and calls, `count` times."""
        return Cost({Resource.LATENCY: seconds * count / self.thread_share})

    def time_all_reduce(self, num_bytes: float) -> Cost:
        """Seconds of an all-reduce among the processes; each sends 2 (n - 1)/n of the bytes."""
        return self._time_sending(2 * num_bytes)

    def time_all_gather(self, num_bytes: float) -> Cost:
        """Seconds of an all-gather of `num_bytes` in total; each process sends (n - 1)/n of them."""
        return self._time_sending(num_bytes)

    def _time_sending(self, num_bytes: float) -> Cost:
        sent = num_bytes * (self.num_processes - 1) / self.num_processes
        return Cost({Resource.NETWORK: sent / (self.host.collective_bytes_per_s * self.thread_share)})


def read_host(profile: CpuProfile) -> CpuHost | None:
    """Read the rates of a profile; None where a rate or latency is missing, because an unknown is not zero."""
    rates = profile.rates or CpuRates()
    flops = rates.flops_per_s.get(ComputeDtype.FLOAT32)
    cores, memory, fresh = rates.num_cores, rates.memory_bytes_per_s, rates.fresh_memory_bytes_per_s
    sent, disk, launch = rates.collective_bytes_per_s, rates.disk_bytes_per_s, rates.launch
    if not (flops and cores and memory and fresh and sent and disk and launch and profile.latencies):
        return None
    return CpuHost(
        cores.value, flops.value, memory.value, fresh.value, sent.value, disk.value, launch.value, profile.latencies
    )


def find_task_ends(seconds: list[float], num_cores: int) -> list[float]:
    """End times of single-threaded tasks that start together and share the cores evenly.


    >>> find_task_ends([2.0, 4.0, 6.0], 2)  # three on two cores: 3.0; then two, one core each: 5.0, 7.0
    [3.0, 5.0, 7.0]
    """
    now, done, ends = 0.0, 0.0, {}
    for position, task in enumerate(sorted(range(len(seconds)), key=seconds.__getitem__)):
        # processor sharing: with more tasks than cores, each runs at cores / tasks of its speed
        now += (seconds[task] - done) * max(1.0, (len(seconds) - position) / num_cores)
        done, ends[task] = seconds[task], now
    return [ends[task] for task in range(len(seconds))]


SANDBOX_S = 0.020
"""Seconds of a fresh sandbox with one test. Source: reports/sandbox: two cores, CPython 3.11, bubblewrap."""
MATH_S = 0.003
"""Seconds to compare two short numbers. Source: measured, math-verify 0.9.0, CPU time: integers 2.5 ms, fractions
3.2 ms."""


def judging_s(reward: RewardSpec) -> float:
    """Core seconds per response; 0 for rewards that the driver computes and for those that cannot be predicted.

    Counts: one sandbox, or one comparison of mathematical answers. Source: this module's constants.
    Assumes: short programs and answers.

    >>> from rlplan.spec.parts.rewards import CodeExecutorSpec, FormatCheckerSpec
    >>> judging_s(CodeExecutorSpec(kind="code_executor")), judging_s(FormatCheckerSpec(kind="format_checker"))
    (0.02, 0.0)
    """
    if isinstance(reward, CodeExecutorSpec):
        return SANDBOX_S
    return MATH_S if isinstance(reward, AnswerMatcherSpec) and reward.compares == "math" else 0.0


def waiting_s(num_responses: int, response_s: float, num_at_a_time: int, beside_s: float) -> float:
    """Seconds that a step waits for rewards after generation has ended.

    Counts: n c / min(w, C) - g, at least the c of the last response. Source: each response is judged when it ends
    (runtime/rewards/reward_pool.py). Assumes: responses end evenly over generation, and judging finds free cores.

    >>> waiting_s(100, 0.02, 2, 0.4), waiting_s(100, 0.02, 2, 60.0)
    (0.6, 0.02)
    """
    return max(response_s, num_responses * response_s / num_at_a_time - beside_s)


def verify_s(job: ResolvedJob, num_cores: int, beside_s: float) -> float:
    """Seconds that a step waits for all rewards with their own processes.

    Counts: `waiting_s` with the rewards added up. Source: as `waiting_s`. Assumes: as `waiting_s`.
    """
    response_s = sum(judging_s(reward) for reward in job.rewards)
    at_a_time = min(job.limits.num_reward_workers, num_cores)
    return waiting_s(job.workload.num_rollouts_per_step, response_s, at_a_time, beside_s)
