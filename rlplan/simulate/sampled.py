"""Simulation of very many rollouts by a sample: some engines with their share of the prompts represent all of them.

In: a SimulationSetting, a seed. Out: a SimulationResult for all engines. Left out: settings with few rollouts, which
are simulated in full.

Engines are alike and take prompts in order, so an engine in the sample has the same number and lengths of rollouts as
in a full simulation. One thing differs: the slowest of fewer engines is faster, by 0.6 to 1.0 % of a step with half of
the engines and 1.6 % with a quarter (docs/lab-notes.md, A part of the engines). Costs of other actions are not scaled.
"""

from dataclasses import replace

from rlplan.simulate.result import SimulationResult
from rlplan.simulate.run import simulate
from rlplan.simulate.setting import SimulationSetting, StepRollouts

MOST_ROLLOUTS = 1 << 16
"""Most rollouts of a step that is simulated in full; each takes some 25 microseconds."""
LEAST_ENGINES = 16
"""Fewest engines of a sample."""


def simulate_sampled(setting: SimulationSetting, seed: int = 0, most: int = MOST_ROLLOUTS) -> SimulationResult:
    """Simulate all engines, or a sample where a step has over `most` rollouts. Raises: SpecError as `simulate`."""
    work = setting.rollouts
    part = work and choose_sample(work, most)
    if part is None or work is None or part is work or _counts_more(setting):
        return simulate(setting, seed)
    scale = work.num_prompts / part.num_prompts
    result = simulate(replace(setting, rollouts=part), seed)
    counts = ("num_tokens", "num_trained_tokens", "num_prefill_tokens", "num_preemptions")
    return replace(
        result,
        **{name: round(scale * getattr(result, name)) for name in counts},
        token_staleness={age: round(scale * count) for age, count in result.token_staleness.items()},
        rollout_staleness={age: round(scale * count) for age, count in result.rollout_staleness.items()},
        simulated_share=1 / scale,
    )


def choose_sample(work: StepRollouts, most: int) -> StepRollouts:
    """Choose the sample with about `most` rollouts. Small steps, few engines or few prompts keep everything.

    Counts: e of E engines with p = P e / E of P prompts, p >= 1. e is between max(16, E most / (P samples)) and twice
    that, chosen so that p is nearest to a whole number.
    """
    num_engines = work.num_engines
    share = max(most / (work.num_prompts * work.num_samples), 1 / work.num_prompts)
    least = max(LEAST_ENGINES, round(num_engines * share))
    if least >= num_engines or work.num_prompts * work.num_samples <= most:
        return work

    def measure_rounding(engines: int) -> float:
        exact = work.num_prompts * engines / num_engines
        return abs(round(exact) / exact - 1)

    engines = min(range(least, min(2 * least, num_engines) + 1), key=measure_rounding)
    return replace(work, num_engines=engines, num_prompts=round(work.num_prompts * engines / num_engines))


def _counts_more(setting: SimulationSetting) -> bool:
    """Whether the setting has other limits in rollouts, which a sample would have to scale."""
    asynchrony = setting.asynchrony
    return asynchrony is not None and (asynchrony.max_groups_at_once is not None or asynchrony.num_takes > 1)
