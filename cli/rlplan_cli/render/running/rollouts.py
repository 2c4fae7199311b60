"""Rollouts of a run in a terminal: a line of facts about each, then its prompt and its response.

In: rows of `choose_rollouts`. Out: stdout, folded at the terminal's width.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from rlplan_cli.render.terminal import PIPE_WIDTH, stdout

MAX_CHARACTERS = 4000
"""Characters of a text that a terminal shows; `--json` and the page have all of them."""


def show_rollouts(rows: Sequence[dict[str, Any]], limit: int) -> None:
    """Show the first `limit` rollouts."""
    for row in rows[:limit]:
        stdout.print(_fold(_describe(row), ""), style="bold")
        turns = [(turn["role"], turn["text"]) for turn in row["turns"]] or [("response", row["text"])]
        for name, text in (("prompt", row["prompt"]), ("truth", row["truth"]), *turns, ("no reward", row["failure"])):
            if text:
                left_out = len(text) - MAX_CHARACTERS
                more = f" ... ({left_out:,} more characters)" if left_out > 0 else ""
                stdout.print(Text(f"{name}:", style="dim"))
                stdout.print(_fold(text[:MAX_CHARACTERS] + more, "  "))
        stdout.print()
    count = f"{len(rows):,} rollout{'s' * (len(rows) != 1)}"
    stdout.print(f"{limit} of {count}; --limit, --best or --worst show others" if limit < len(rows) else count)


def _describe(row: Mapping[str, Any]) -> str:
    """One line of facts about a rollout."""
    facts = [f"step {row['step']}", f"prompt {row['prompt_id']}"]
    if row["loss"] is None:
        rewards = ", ".join(f"{name} {value:g}" for name, value in row["rewards"].items())
        facts += [f"reward {row['reward']:g}" + f" ({rewards})" * bool(rewards), f"advantage {row['advantage']:+.3f}"]
    else:
        facts.append(f"loss of the step {row['loss']:.4g}")
    facts.append(f"{row['num_tokens']:,} tokens" + f" in {row['num_turns']} turns" * bool(row["turns"]))
    facts.append("truncated" if row["is_truncated"] else f"ended by {row['stop_reason']}")
    facts += [f"policy version {row['version']}"] if isinstance(row.get("version"), int) else []
    return "  ".join(facts)


def _fold(text: str, margin: str) -> str:
    """Break a text into lines of the terminal's width, besides its own line breaks."""
    width = min(stdout.width, PIPE_WIDTH)
    lines = [textwrap.wrap(line, width, initial_indent=margin, subsequent_indent=margin) for line in text.splitlines()]
    return "\n".join("\n".join(folded) for folded in lines)
