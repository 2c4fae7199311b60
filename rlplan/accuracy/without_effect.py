"""Settings of points that change no prediction, with the reasons.

In: the kind of a point, a setting's name, all settings. Out: the reason why it has no effect; None where it may have
one. A row may hold only for some values: `attn: sdpa` stores no attention scores, `attn: eager` would.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

KINDS = {
    "TRAINING": r"train_peak|train_steady|throughput_train|max_model_size|logprob_\w+",
    "MEMORY_OF_TRAINING": r"train_peak|train_steady|logprob_\w+",
    "ASLEEP_OR_AWAKE": r"sleeping_engine_residual|rollout_peak",
    "TIME": r"throughput_train|rl_step_time|weight_sync_time",
    "ENGINE": r"vllm_\w+|kv_\w+|serving_\w+|throughput_infer",
}
"""Patterns of kinds by their names in the table."""


@dataclass(frozen=True)
class WithoutEffect:
    """Settings that do not change a prediction. Patterns must match the whole text in lower case."""

    names: str
    why: str
    kinds: str = ""
    """Pattern of kinds of points; empty for every kind."""
    values: str = ""
    """Pattern of values; empty for every value."""
    beside: tuple[str, ...] = ()
    """Settings of which one must be stated; empty for none."""

    def holds(self, kind: str, name: str, settings: Mapping[str, Any]) -> bool:
        """Whether this row applies to a setting."""
        return (
            re.fullmatch(self.names, name.lower()) is not None
            and (not self.kinds or re.fullmatch(self.kinds, kind) is not None)
            and (not self.values or re.fullmatch(self.values, str(settings[name]).strip().lower()) is not None)
            and (not self.beside or any(settings.get(key) is not None for key in self.beside))
        )


def why_without_effect(kind: str, name: str, settings: Mapping[str, Any]) -> str | None:
    """The reason why a setting changes no prediction of a kind; None without one.

    >>> why_without_effect("train_peak", "attn", {"attn": "sdpa"})
    'no kernel of flash attention stores scores'
    >>> why_without_effect("train_peak", "attn", {"attn": "eager"}) is None
    True
    """
    return next((row.why for row in ROWS if row.holds(kind, name, settings)), None)


def _parse_row(row: Mapping[str, str]) -> WithoutEffect:
    kinds = "|".join(KINDS.get(word, word) for word in row["kinds"].split("|"))
    return WithoutEffect(row["names"], row["why"], kinds, row["values"], tuple(row["beside"].split()))


TABLE = resources.files("rlplan.accuracy") / "data" / "without_effect.csv"
ROWS = tuple(map(_parse_row, csv.DictReader(TABLE.read_text("utf-8").splitlines())))
"""Rows in order; the first that holds gives the reason."""
