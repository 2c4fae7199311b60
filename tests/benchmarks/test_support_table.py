"""docs/models.md says what the catalogue, the families and the GPU profiles hold."""

from benchmarks import support_table
from rlplan.spec.models.catalogue import find_model


def test_the_committed_page_is_what_the_script_writes() -> None:
    assert support_table.PAGE.read_text(encoding="utf-8") == support_table.render()


def test_a_cell_says_what_the_formulas_take() -> None:
    letters = {
        name: support_table.find_activations(find_model(name))
        for name in (
            "Qwen/Qwen2.5-7B",
            "LiquidAI/LFM2-1.2B",
            "nvidia/Nemotron-H-56B-Base-8K",
            "tiiuae/Falcon-H1-7B-Instruct",
        )
    }
    assert [*letters.values()] == ["A", "A", "a", ""]
