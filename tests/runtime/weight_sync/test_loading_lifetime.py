"""Tables with a padded vocabulary keep the trainer's rows when the arena is written over before the reload ends."""

from pathlib import Path
from typing import Any

import pytest

from tests.runtime.live.live_forks import SERVING, read_answers, start

pytestmark = pytest.mark.engine
TABLES = ["embed.weight", "head.weight", "head.bias"]
SENT, OVERWRITTEN = [1.0], [99.0]


def reload(folder: Path, vocabulary: int) -> dict[str, Any]:
    path = folder / "answer.json"
    target = "tests.runtime.weight_sync.live_reload:main"
    process = start(target, str(path), vocabulary, log=folder / "log", environment={}, libraries=SERVING)
    try:
        return read_answers([process], [path], 120)[0]  # type: ignore[no-any-return]
    finally:
        process.close()


def test_padded_tables_are_processed_at_once_or_copied_and_vllm_alone_reads_what_came_later(tmp_path: Path) -> None:
    """74 rows are padded to 128. Sent 1.0, and 99.0 lies in the arena when the reload ends."""
    ways = reload(tmp_path, 74)
    assert ways["vllm alone"]["values"] == dict.fromkeys(TABLES, OVERWRITTEN)
    assert ways["vllm alone"]["held"] == TABLES  # which the comparison after loading reports
    assert ways["counted"] == {"held": [], "copied_bytes": 0, "values": dict.fromkeys(TABLES, SENT)}
    assert ways["copied"]["values"] == dict.fromkeys(TABLES, SENT)
    assert ways["copied"]["copied_bytes"] == 4 * 74 * (8 + 8 + 1)


def test_tables_that_need_no_padding_are_never_held(tmp_path: Path) -> None:
    ways = reload(tmp_path, 128)
    assert [answer["held"] for answer in ways.values()] == [[], [], []]
