"""Rollouts of a run in a terminal: a line of facts about each, then its prompt and its response.

In: rows of a run's `rollouts/`. Out: stdout, folded at the terminal's width.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from rlplan.runtime.run_folder.reading_rollouts import list_rewards
from rlplan_cli.render.terminal import PIPE_WIDTH, stdout

INDENT = 2
MAX_CHARACTERS = 4000
"""Characters of a text that a terminal shows; `--json` and the page have all of them."""


def show_rollouts(
    rows: Sequence[dict[str, Any]], limit: int, losses: Mapping[int, float], *, learns_from_rewards: bool
) -> None:
    """Show the first `limit` rollouts. losses: by step, shown instead of rewards where none is learned from."""
    for row in rows[:limit]:
        stdout.print(_fold(_describe(row, losses, learns_from_rewards=learns_from_rewards), 0), style="bold")
        parts = [("prompt", row["prompt"]), ("truth", row["truth"])]
        parts += [(turn["role"], turn["text"]) for turn in row["turns"]] or [("response", row["text"])]
        parts.append(("no reward", row["failure"]))
        for name, text in parts:
            if text:
                stdout.print(Text.assemble((f"{name}:", "dim")))
                stdout.print(_fold(_shorten(text), INDENT))
        stdout.print()
    count = f"{len(rows):,} rollout{'s' * (len(rows) != 1)}"
    stdout.print(f"{limit} of {count}; --limit, --best or --worst show others" if limit < len(rows) else count)


def _describe(row: Mapping[str, Any], losses: Mapping[int, float], *, learns_from_rewards: bool) -> str:
    """One line of facts about a rollout."""
    facts = [f"step {row['step']}", f"prompt {row['prompt_id']}"]
    if learns_from_rewards:
        rewards = ", ".join(f"{name} {value:g}" for name, value in list_rewards(dict(row)).items())
        facts.append(f"reward {row['reward']:g}" + (f" ({rewards})" if rewards else ""))
        facts.append(f"advantage {row['advantage']:+.3f}")
    elif row["step"] in losses:
        facts.append(f"loss of the step {losses[row['step']]:.4g}")
    facts.append(f"{row['num_tokens']:,} tokens" + (f" in {row['num_turns']} turns" if row["turns"] else ""))
    facts.append("truncated" if row["is_truncated"] else f"ended by {row['stop_reason']}")
    facts += [f"policy version {row['version']}"] if isinstance(row.get("version"), int) else []
    return "  ".join(facts)


def _shorten(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]} ... ({left_out:,} more characters)"


def _fold(text: str, indent: int) -> str:
    """A text in lines of the terminal's width, with its own line breaks."""
    width, margin = min(stdout.width, PIPE_WIDTH), " " * indent
    lines = [textwrap.wrap(line, width, initial_indent=margin, subsequent_indent=margin) for line in text.splitlines()]
    return "\n".join("\n".join(folded) for folded in lines)
