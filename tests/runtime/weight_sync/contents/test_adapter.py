"""The folder through which an engine process hands vLLM an adapter, beside other processes that do the same."""

import tempfile
from pathlib import Path

import pytest

from rlplan.runtime.weight_sync.contents import adapter


def test_a_folder_survives_another_process_that_takes_an_adapter_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines of a host take a version at the same moment; each removes what killed processes have left."""
    monkeypatch.setattr(adapter, "SHARED_FOLDER", str(tmp_path))
    make = tempfile.mkdtemp

    def make_beside_another(**asked: str) -> str:
        built = make(**asked)
        with monkeypatch.context() as inner:
            inner.setattr(tempfile, "mkdtemp", make)
            with adapter._folder_in_memory(1):
                pass
        return built

    monkeypatch.setattr(tempfile, "mkdtemp", make_beside_another)
    left = tmp_path / "rlplan-1-adapter-1-killed"
    left.mkdir()
    with adapter._folder_in_memory(1) as folder:
        assert folder.is_dir()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
