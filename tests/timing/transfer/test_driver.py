"""Seconds of a padded batch's way through the driver."""

import pytest

from rlplan.timing.cost import Resource
from rlplan.timing.transfer.driver import send_batch_cost


def test_log_prob_passes_of_verl_s_page_have_36_seconds_that_no_gpu_shortens():
    """Source: verl, docs/advance/fully_async.md: 107.7, 70.3, 53.9 s on 32, 64, 128 GPUs: 36 s and 2,290 GPU s."""
    cost = send_batch_cost(512 * 16, 2048, 28_672, num_results=2)
    assert cost.seconds == pytest.approx(36, rel=0.25)
    assert set(cost.parts) == {Resource.HOST}


def test_an_update_is_sent_more_and_returns_nothing():
    update, scoring = (send_batch_cost(64, 1024, 8192, num_results=results) for results in (0, 1))
    assert 1.0 < update.seconds / scoring.seconds < 1.3
