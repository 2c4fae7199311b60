"""Leaks: memory that grows step after step, told from memory that settles.

In: what each process holds at the end of each step. Out: an alarm, once a process.
Left out: growth that the plan itself predicts; nothing does after the first steps.

The slope is the Theil-Sen estimate, the median of the slopes between all pairs of the last WINDOW steps: up to 29 % of
the points may be outliers (one long prompt, one evaluation) without moving it far. It raises the alarm when it is above
the threshold and more than SHARE_RISING of the pairs rise, which a step up that then stays level does not do.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import combinations
from statistics import median
from typing import NamedTuple

from rlplan.units import MIB, format_bytes

SETTLING_STEPS = 3
"""Optimizer states, caches and heaps reach their size in the first steps; these do not count."""

WINDOW = 12
"""Steps that the slope is taken over, and the least that there must be."""

LEAST_SLOPE = 4 * MIB
"""Bytes a step. The committed quickstart's engine grows by 1 to 2 MiB a step until its heap has settled."""

LEAST_SHARE = 0.005
"""Of what the process holds, a step: a large process wavers by more."""

SHARE_RISING = 0.9
"""Noise alone makes more than that of 66 pairs rise about once in 50,000 windows (Kendall's test)."""


class Leak(NamedTuple):
    """What a process grows by. text: for people."""

    process: str
    bytes_per_step: int
    text: str


def theil_sen(values: list[tuple[int, int]]) -> tuple[float, float]:
    """(median slope, share of pairs that rise) of points (step, bytes).

    >>> theil_sen([(1, 10), (2, 20), (3, 30), (4, 1000), (5, 50)])
    (10.0, 0.9)
    """
    slopes = [(second[1] - first[1]) / (second[0] - first[0]) for first, second in combinations(values, 2)]
    return float(median(slopes)), sum(slope > 0 for slope in slopes) / len(slopes)


class LeakWatch:
    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._alarmed: set[str] = set()

    def observe(self, step: int, resident: Mapping[str, int]) -> Iterator[Leak]:
        """The processes that are found to leak at the end of this step."""
        if step <= SETTLING_STEPS:
            return
        for process, size in resident.items():
            points = self._points[process]
            points.append((step, size))
            if len(points) < WINDOW or process in self._alarmed:
                continue
            slope, rising = theil_sen(list(points))
            threshold = max(LEAST_SLOPE, int(LEAST_SHARE * size))
            if slope > threshold and rising > SHARE_RISING:
                self._alarmed.add(process)
                text = (
                    f"{process} grows by {format_bytes(int(slope))} a step over the last {WINDOW} steps and holds "
                    f"{format_bytes(size)}; more than {format_bytes(threshold)} a step counts as a leak"
                )
                yield Leak(process, int(slope), text)

    def forget(self, process: str) -> None:
        """A process was restarted: what it held before says nothing."""
        self._points.pop(process, None)
