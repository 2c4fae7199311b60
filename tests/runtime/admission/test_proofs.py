"""Models that a run accepts: a proved architecture is not probed again, and a failed probe states the difference."""

import json
from pathlib import Path

import pytest

from rlplan.errors import SpecError
from rlplan.runtime.admission.proofs import SHIPPED, check_architecture, proof_key
from rlplan.runtime.admission.shrinking import shrink_config
from tests.factories import EXAMPLES, config_data
from tests.runtime.runs.architectures import REFUSED, make_config

HEADS = config_data(head_dim=64)


@pytest.mark.parametrize("name", ["sorter", "decoder-160m"])
def test_the_models_that_come_along_are_proved_for_the_versions_that_are_installed(name: str) -> None:
    config = json.loads((EXAMPLES / "models" / name / "config.json").read_text())
    assert proof_key(shrink_config(config)) in json.loads(SHIPPED.read_text())


def test_what_was_proved_is_not_proved_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "rlplan" / "proofs"
    folder.mkdir(parents=True)
    (folder / f"{proof_key(shrink_config(HEADS))}.json").write_text("{}")
    check_architecture(HEADS, "here")


@pytest.mark.engine
@pytest.mark.nightly
def test_what_differs_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SpecError, match=r"Qwen3ForCausalLM cannot be run: vLLM does not (serve|generate)"):
        check_architecture(config_data(head_dim=16), "here")  # no kernel for such heads
    for name in REFUSED:
        with pytest.raises(SpecError, match=f"{name} cannot be run: log-probs of trainer and engine differ"):
            check_architecture(make_config(name), "here")
    assert not (tmp_path / "rlplan").exists()


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("positions", [64, 32])
def test_a_model_for_short_sequences_is_proved_with_sequences_that_it_can_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, positions: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_architecture(config_data(head_dim=64, max_position_embeddings=positions), "here")
    assert len(list((tmp_path / "rlplan" / "proofs").iterdir())) == 1
