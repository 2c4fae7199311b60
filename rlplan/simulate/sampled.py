"""A simulation of very many rollouts: a sample of the engines, with its share of the prompts, stands for all of them.

In: a SimulationSetting, a seed. Out: a SimulationResult of the whole. Left out: settings with few rollouts, which are
simulated whole.

Engines are alike and take prompts as they come, so an engine of the sample has as many rollouts as one of the whole, of
the same lengths. What differs: the slowest of fewer engines is faster, by 0.6 to 1.0 % of a step in half of them and
1.6 % in a quarter (docs/decisions.md, A part of the engines). Costs of other actions are those of the whole.
"""

from dataclasses import replace

from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import SimulationSetting, StepRollouts

MOST_ROLLOUTS = 1 << 16
"""Of a step that is simulated whole: each takes some 25 microseconds."""
LEAST_ENGINES = 16
"""Of a sample."""


def simulate_sampled(setting: SimulationSetting, seed: int = 0, most: int = MOST_ROLLOUTS) -> SimulationResult:
    """Simulate all engines, or a sample where a step has more than `most` rollouts. Raises: SpecError as `simulate`."""
    work = setting.rollouts
    part = work and part_of(work, most)
    if part is None or work is None or part is work or _counts_more(setting):
        return simulate(setting, seed)
    scale = work.num_prompts / part.num_prompts
    found = simulate(replace(setting, rollouts=part), seed)
    counts = ("num_tokens", "num_trained_tokens", "num_prefill_tokens", "num_preemptions")
    return replace(
        found,
        **{name: round(scale * getattr(found, name)) for name in counts},
        token_staleness={age: round(scale * count) for age, count in found.token_staleness.items()},
        rollout_staleness={age: round(scale * count) for age, count in found.rollout_staleness.items()},
        simulated_share=1 / scale,
    )


def part_of(work: StepRollouts, most: int) -> StepRollouts:
    """The sample with about `most` rollouts; everything where a step has no more, or where engines or prompts are few.

    Counts: e of E engines with p = P e / E of P prompts, p >= 1. e is at least 16 and E most / (P samples), and at most
    twice that: the one whose p is nearest to a whole number.
    """
    num_engines = work.num_engines
    share = max(most / (work.num_prompts * work.num_samples), 1 / work.num_prompts)
    least = max(LEAST_ENGINES, round(num_engines * share))
    if least >= num_engines or work.num_prompts * work.num_samples <= most:
        return work

    def miss(engines: int) -> float:
        exact = work.num_prompts * engines / num_engines
        return abs(round(exact) / exact - 1)

    engines = min(range(least, min(2 * least, num_engines) + 1), key=miss)
    return replace(work, num_engines=engines, num_prompts=round(work.num_prompts * engines / num_engines))


def _counts_more(setting: SimulationSetting) -> bool:
    """Whether something else is counted in rollouts, of which a part would need its share."""
    asynchrony = setting.asynchrony
    return asynchrony is not None and (asynchrony.max_groups_at_once is not None or asynchrony.num_takes > 1)
