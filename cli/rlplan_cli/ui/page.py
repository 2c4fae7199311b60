"""The page of `rlplan ui`: a form with its choices. In: the token. Out: HTML."""

from typing import Any

FIRST = {"model": "Qwen/Qwen2.5-7B", "algorithm": "grpo", "gpu": "h100-sxm", "count": "8"}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (
    ("max_prompt_len", "Max prompt tokens", "1024", 131072),
    ("max_response_len", "Max response tokens", "4096", 131072),
    ("num_prompts", "Prompts per step", "128", 4096),
    ("num_samples", "Samples per prompt", "8", 256),
)
"""Field, label, initial value, largest value of its slider."""


def page(token: str) -> str:
    """Render the page."""
    from rlplan.report import html
    from rlplan.spec.algorithms import ALGORITHMS
    from rlplan.spec.hardware.catalogue import profile_paths
    from rlplan.spec.models.catalogue import load_catalogue
    from rlplan.vocabulary import Placement
    from rlplan_cli.ui.answer import given_answers

    choices: dict[str, Any] = {
        "models": sorted(load_catalogue()),
        "algorithms": list(ALGORITHMS),
        "given": given_answers(),
        "gpus": [name for name in profile_paths() if name != "cpu-host"],
        "counts": COUNTS,
        "placements": [str(placement) for placement in Placement],
    }
    return html.render("ui.html.j2", token=token, first=FIRST, lengths=LENGTHS, **choices)
