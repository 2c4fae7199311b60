"""Messages about a process that failed in a call."""

from pathlib import Path

import pytest

from rlplan.runtime.cluster.worker_group import _last_line

BAR = "Loading weights: 100%|██████████| 46/46 [00:00<00:00, 13442.35it/s]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RuntimeError: no room\n", ": RuntimeError: no room"),
        (f"ready\n{BAR}\n\n", ": ready"),
        (f"\rLoading weights:   0%|          | 0/46 [00:00<?, ?it/s]\r{BAR}\n", ""),
        ("", ""),
    ],
)
def test_the_last_line_of_a_lost_process_s_log_is_no_progress_bar(text: str, message: str, tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text(text)
    assert _last_line(log) == message
    assert _last_line(tmp_path / "none.log") == ""
