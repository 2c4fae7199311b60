"""Islands: groups of devices that must be on one host, assigned to the cluster's hosts before anything starts.

The largest island is assigned first, to the host where it leaves the least free (best fit). If the sizes of islands and
hosts are powers of two, as is usual with GPUs, this finds an assignment whenever one exists; otherwise it may miss one.
In: what each island asks for and what each host has free. Out: a host for each island, or the reason why not.
Left out: Ray itself (ray_cluster.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Host:
    node: str
    """Ray's id of the node."""

    address: str
    free: Resources
    """Resources that are not reserved, by Ray's names."""

    total: Resources


def add_up(bundles: Sequence[Resources]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for bundle in bundles for kind in bundle)
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in kinds}


def deal_islands(islands: Sequence[Resources], hosts: Sequence[Host], spreads: bool) -> tuple[int, ...] | str:
    """Choose the index of a host for each island, or say why they do not fit. spreads: no two islands on one host."""
    left = [dict(host.free) for host in hosts]
    chosen: dict[int, int] = {}
    for index in sorted(range(len(islands)), key=lambda number: -max(islands[number].values(), default=0.0)):
        island = islands[index]
        open_hosts = [host for host in range(len(hosts)) if not (spreads and host in chosen.values())]
        fitting = [host for host in open_hosts if _can_hold(left[host], island)]
        if not fitting:
            return _explain_misfit(islands, index, hosts, len(chosen), spreads)
        best = min(fitting, key=lambda host: (_compute_leftover(left[host], island), host))
        chosen[index] = best
        for kind, amount in island.items():
            left[best][kind] -= amount
    return tuple(chosen[index] for index in range(len(islands)))


def _can_hold(free: Resources, island: Resources) -> bool:
    return all(free.get(kind, 0.0) >= amount for kind, amount in island.items())


def _compute_leftover(free: Resources, island: Resources) -> tuple[float, ...]:
    """Amounts left of each kind. Accelerators come before CPUs because they are scarce."""
    return tuple(free.get(kind, 0.0) - island[kind] for kind in sorted(island, key=lambda kind: kind == "CPU"))


def _explain_misfit(
    islands: Sequence[Resources], index: int, hosts: Sequence[Host], num_placed: int, spreads: bool
) -> str:
    asked = add_up(islands)
    free = add_up([host.free for host in hosts])
    short = [kind for kind in asked if asked[kind] > free.get(kind, 0.0)]
    if short:
        kind = short[0]
        available = _format_amount(free.get(kind, 0.0), kind)
        return f"the plan needs {_format_amount(asked[kind], kind)}, {available} free in the cluster"
    if spreads and len(islands) > len(hosts):
        return f"the plan needs {len(islands)} hosts, the cluster has {len(hosts)}"
    wanted = " and ".join(_format_amount(amount, kind) for kind, amount in islands[index].items())
    largest = {kind: max((host.free.get(kind, 0.0) for host in hosts), default=0.0) for kind in islands[index]}
    most = " and ".join(_format_amount(amount, kind) for kind, amount in largest.items())
    return (
        f"{num_placed} of {len(islands)} parts have a host; the next one needs {wanted} on one host, and the most that "
        f"any of {len(hosts)} hosts has free is {most}"
    )


def _format_amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind}" + ("" if amount == 1 else "s")
