"""The hub, stood in for by a server on the loopback: a config is fetched once, and what goes wrong has its name."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from rlplan.errors import RlplanError
from rlplan.runtime.models.hub import fetch_config
from tests.hub_server import CONFIG, TOKEN, Hub, serve_hub
from tests.repository.at_night import mark_nightly


@dataclass(frozen=True)
class Fetched:
    """The output of a command."""

    stdout: str = ""
    stderr: str = ""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


def fetch(name: str, endpoint: str, cache: Path, **variables: str) -> Fetched:
    environment = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": endpoint, "XDG_CACHE_HOME": str(cache), "HOME": str(cache)}
    with patch.dict(os.environ, environment | variables, clear=True):
        try:
            return Fetched(stdout=f"{fetch_config(name)}\n")
        except RlplanError as error:
            return Fetched(stderr=str(error))


def test_a_config_is_fetched_once_and_then_read_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = fetch("someone/model", hub.address, tmp_path)
    path = Path(first.stdout.strip())
    assert path == tmp_path / "rlplan" / "configs" / "someone--model" / "config.json", first.stderr
    assert path.read_bytes() == CONFIG
    assert [*path.parent.iterdir()] == [path]
    assert fetch("someone/model", "http://127.0.0.1:9", tmp_path).stdout == first.stdout


def test_a_model_that_the_hub_does_not_have_is_said_to_be_missing(hub: Hub, tmp_path: Path) -> None:
    answer = fetch("someone/else", hub.address, tmp_path)
    assert "the hub does not provide the config.json of 'someone/else' (HTTP 404)" in answer.stderr
    assert not (tmp_path / "rlplan").exists()


def test_a_hub_that_cannot_be_reached_is_said_to_be_so(tmp_path: Path) -> None:
    answer = fetch("someone/model", "http://127.0.0.1:9", tmp_path)
    assert "the hub cannot be reached: [Errno 111] Connection refused" in answer.stderr
    assert "http://127.0.0.1:9/someone/model/resolve/main/config.json" in answer.stderr


def test_the_hub_gets_the_id_and_our_name_and_no_token_where_it_asks_for_none(hub: Hub, tmp_path: Path) -> None:
    fetch("someone/model", hub.address, tmp_path, HF_TOKEN=TOKEN)
    assert hub.requests[0][0] == "/someone/model/resolve/main/config.json"
    for _, headers in hub.requests:
        assert set(headers) == {"Accept-Encoding", "Host", "User-Agent", "Connection"}
        assert headers["User-Agent"].startswith("rlplan/")


@pytest.mark.parametrize("kept_in", mark_nightly(["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME"], but=("HF_TOKEN_PATH",)))
def test_a_model_with_terms_of_use_is_asked_for_once_more_with_the_token(
    kept_in: str, hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    value = {"HF_TOKEN": TOKEN, "HF_TOKEN_PATH": f"{tmp_path}/token", "HF_HOME": str(tmp_path)}[kept_in]
    answer = fetch("someone/gated", hub.address, tmp_path, **{kept_in: value})
    assert Path(answer.stdout.strip()).read_bytes() == CONFIG, answer.stderr
    assert ["Authorization" in headers for _, headers in hub.requests] == [False, True, True]


def test_a_model_with_terms_of_use_without_a_token_says_how_to_give_one(hub: Hub, tmp_path: Path) -> None:
    answer = fetch("someone/gated", hub.address, tmp_path)
    assert "(HTTP 401)" in answer.stderr
    assert "set HF_TOKEN" in answer.stderr
    assert len(hub.requests) == 1


def test_a_token_is_not_sent_on_to_another_host(hub: Hub, tmp_path: Path) -> None:
    answer = fetch("someone/elsewhere", hub.address, tmp_path, HF_TOKEN=TOKEN)
    assert Path(answer.stdout.strip()).read_bytes() == CONFIG, answer.stderr
    path, headers = hub.requests[-1]
    assert path.startswith("/api/")
    assert headers["Host"].startswith("localhost:")
    assert "Authorization" not in headers


def test_an_answer_that_is_too_long_is_no_config(hub: Hub, tmp_path: Path) -> None:
    answer = fetch("someone/endless", hub.address, tmp_path)
    assert "the hub cannot be reached: an answer of more than" in answer.stderr
    assert not (tmp_path / "rlplan").exists()


def test_no_other_scheme_than_http_is_followed(tmp_path: Path) -> None:
    answer = fetch("someone/model", f"file://{tmp_path}", tmp_path)
    assert "is not an http" in answer.stderr


def test_a_switched_off_hub_is_not_asked(hub: Hub, tmp_path: Path) -> None:
    answer = fetch("someone/model", hub.address, tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in answer.stderr
    assert hub.requests == []
