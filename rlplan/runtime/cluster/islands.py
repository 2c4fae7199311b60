"""Islands: devices that must lie on one host, dealt out over the hosts that there are, before anything starts.

In: what each island asks for and what each host has free. Out: a host for each island, or the reason why not.
Left out: Ray itself (ray_cluster.py). The largest island goes first, to the host where the least is left over: exact
where islands and hosts come in powers of two, as GPUs do; elsewhere a dealing may exist that this does not find.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Host:
    node: str
    """Ray's name for it."""

    address: str
    free: Resources
    """What is not reserved, by Ray's names of resources."""

    total: Resources


def add_up(bundles: Sequence[Resources]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for bundle in bundles for kind in bundle)
    return {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in kinds}


def deal_islands(islands: Sequence[Resources], hosts: Sequence[Host], spreads: bool) -> tuple[int, ...] | str:
    """The index of a host for each island, or why they do not fit. spreads: no two islands on one host."""
    left = [dict(host.free) for host in hosts]
    chosen: dict[int, int] = {}
    for index in sorted(range(len(islands)), key=lambda one: -max(islands[one].values(), default=0.0)):
        island = islands[index]
        open_hosts = [host for host in range(len(hosts)) if not (spreads and host in chosen.values())]
        fitting = [host for host in open_hosts if _holds(left[host], island)]
        if not fitting:
            return _reason(islands, index, hosts, len(chosen), spreads)
        best = min(fitting, key=lambda host: (_left_over(left[host], island), host))
        chosen[index] = best
        for kind, amount in island.items():
            left[best][kind] -= amount
    return tuple(chosen[index] for index in range(len(islands)))


def _holds(free: Resources, island: Resources) -> bool:
    return all(free.get(kind, 0.0) >= amount for kind, amount in island.items())


def _left_over(free: Resources, island: Resources) -> tuple[float, ...]:
    """What stays of each kind, the scarce ones (accelerators) before CPUs."""
    return tuple(free.get(kind, 0.0) - island[kind] for kind in sorted(island, key=lambda kind: kind == "CPU"))


def _reason(islands: Sequence[Resources], index: int, hosts: Sequence[Host], num_placed: int, spreads: bool) -> str:
    asked = add_up(islands)
    there = add_up([host.free for host in hosts])
    short = [kind for kind in asked if asked[kind] > there.get(kind, 0.0)]
    if short:
        kind = short[0]
        return (
            f"the plan asks for {_amount(asked[kind], kind)}, {_amount(there.get(kind, 0.0), kind)} free in the cluster"
        )
    if spreads and len(islands) > len(hosts):
        return f"the plan asks for {len(islands)} hosts, the cluster has {len(hosts)}"
    wanted = " and ".join(_amount(amount, kind) for kind, amount in islands[index].items())
    largest = {kind: max((host.free.get(kind, 0.0) for host in hosts), default=0.0) for kind in islands[index]}
    most = " and ".join(_amount(amount, kind) for kind, amount in largest.items())
    return (
        f"{num_placed} of {len(islands)} parts have a host, and no other host has the {wanted} free that the next one "
        f"asks for together (the most that any of {len(hosts)} has: {most})"
    )


def _amount(amount: float, kind: str) -> str:
    return f"{amount:g} {kind}" + ("" if amount == 1 else "s")
