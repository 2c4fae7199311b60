"""The page of `rlplan ui`: a form with its choices. In: the token. Out: HTML."""

from typing import Any

from rlplan.spec.parts.workload import WorkloadSpec

FIRST = {"model": "Qwen/Qwen2.5-7B", "algorithm": "grpo", "gpus": "8xh100-sxm"}
_USUAL = WorkloadSpec.create_default()
LENGTHS = (
    ("max_prompt_len", "Max prompt tokens", str(_USUAL.max_prompt_len), 131072),
    ("max_response_len", "Max response tokens", str(_USUAL.max_response_len), 131072),
    ("num_prompts", "Prompts per step", str(_USUAL.num_prompts_per_step), 4096),
    ("num_samples", "Samples per prompt", str(_USUAL.num_samples_per_prompt), 256),
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
        "gpus": ["cpu", *(f"8x{name}" for name in profile_paths() if name != "cpu-host")],
        "placements": [str(placement) for placement in Placement],
    }
    return html.render("ui.html.j2", token=token, first=FIRST, lengths=LENGTHS, **choices)
