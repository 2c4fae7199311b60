"""Models on disk: what is loaded, and that a model's folder is data."""

from pathlib import Path

import pytest

from rlplan.runtime.models.start_checkpoint import load_language_model, load_scalar_model
from tests.factories import EXAMPLES
from tests.traps import trapped_model

SORTER = EXAMPLES / "models" / "sorter"


@pytest.mark.parametrize("load", [load_language_model, load_scalar_model])
def test_python_in_a_model_s_folder_is_not_imported(tmp_path: Path, load: object) -> None:
    """A folder whose config names classes of its own, as those of models with `trust_remote_code` do."""
    folder = tmp_path / "model"
    sprung = trapped_model(SORTER, folder)
    assert callable(load)
    model = load(str(folder))
    assert type(model).__module__.startswith("transformers.models.qwen3.")
    assert not sprung.exists()
