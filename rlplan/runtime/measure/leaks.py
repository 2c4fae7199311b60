"""Leak detection: tells memory that grows at every step from memory that settles.

The slope is the Theil-Sen estimate: the median of the slopes between all pairs of the last WINDOW steps. Up to 29 % of
the points may be outliers (a long prompt, an evaluation) without much effect. An alarm needs a slope above the
threshold and a rise in more than SHARE_RISING of the pairs; a single jump that then stays level has fewer.
In: the resident bytes of each process at the end of each step. Out: at most one alarm per process.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import combinations
from statistics import median
from typing import NamedTuple

from rlplan.units import MIB, format_bytes

SETTLING_STEPS = 3
"""Steps that are ignored: optimizer states, caches and heaps reach their size in them."""

WINDOW = 12
"""Number of steps from which the slope is estimated."""

LEAST_SLOPE = 4 * MIB
"""Smallest slope of a leak, in bytes per step. The quickstart's engine grows by 1 to 2 MiB per step until its heap has
settled."""

LEAST_SHARE = 0.005
"""Smallest slope of a leak as a share of the process's size: a large process fluctuates more."""

SHARE_RISING = 0.9
"""Share of rising pairs above which growth is no noise: noise exceeds it about once in 50,000 windows (Kendall's test
with 66 pairs)."""


class Leak(NamedTuple):
    """A process that grows. text: a message for people."""

    process: str
    bytes_per_step: int
    text: str


def theil_sen(values: list[tuple[int, int]]) -> tuple[float, float]:
    """Compute (median slope, share of pairs that rise) of points (step, bytes).

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
        """Yield the processes that are found to leak at the end of this step."""
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
                    f"{process} grew by {format_bytes(int(slope))} per step over the last {WINDOW} steps, to "
                    f"{format_bytes(size)}; more than {format_bytes(threshold)} per step counts as a leak"
                )
                yield Leak(process, int(slope), text)

    def forget(self, process: str) -> None:
        """Forget the sizes of a process that was restarted."""
        self._points.pop(process, None)
