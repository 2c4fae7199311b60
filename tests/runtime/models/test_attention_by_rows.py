"""Windows, caps and sinks against attention written out, values and gradients, in blocks of few rows and of all."""

from itertools import product
from typing import Any

import pytest
import torch

from rlplan.runtime.models import attention_by_rows
from rlplan.runtime.models.attention_by_rows import Scores, attend_by_rows

LENS = (9, 9, 12)


def written_out(q: Any, k: Any, v: Any, sinks: Any, scores: Scores) -> Any:
    outputs = []
    for query, key, value in zip(*(tensor.split(LENS, 2) for tensor in (q, k, v)), strict=True):
        length = query.shape[2]
        score = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * scores.scale
        if scores.cap is not None:
            score = scores.cap * torch.tanh(score / scores.cap)
        back = torch.arange(length)[:, None] - torch.arange(length)
        score = score.masked_fill((back < 0) | (back >= (scores.window or length)), float("-inf"))
        if sinks is not None:
            score = torch.cat([score, sinks[None, :, None, None].expand(1, -1, length, 1)], -1)
        outputs.append(score.softmax(-1)[..., :length] @ value.repeat_interleave(2, 1))
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize(
    ("window", "cap", "has_sinks", "at_once"), list(product((None, 5), (None, 2.0), (False, True), (1 << 20, 200)))
)
def test_it_is_attention_written_out(
    monkeypatch: pytest.MonkeyPatch, window: int | None, cap: float | None, has_sinks: bool, at_once: int
) -> None:
    monkeypatch.setattr(attention_by_rows, "SCORES_AT_ONCE", at_once)
    torch.manual_seed(0)
    scores = Scores(0.3, window, cap)
    inputs = [torch.randn(1, heads, sum(LENS), 8, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    output = attend_by_rows(inputs[0], inputs[1], inputs[2], sinks, LENS, scores)
    wanted = written_out(*inputs, sinks, scores)
    torch.testing.assert_close(output, wanted, atol=2e-6, rtol=0)
    gradient, learned = torch.randn_like(output), [*inputs, *([] if sinks is None else [sinks])]
    for ours, theirs in zip(*(torch.autograd.grad(out, learned, gradient) for out in (output, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)
