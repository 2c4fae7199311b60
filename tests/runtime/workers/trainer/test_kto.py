"""KTO's gradient on live DeepSpeed is TRL's own on the whole batch, with plain transformers, however it is cut."""

from typing import Any

import pytest

from tests.factories import make_job
from tests.runtime.live.live_kto import EVERY, answers
from tests.runtime.live.live_ranks import exercise
from tests.runtime.losses import trl_code

pytestmark = pytest.mark.engine

BETA = 0.05
LIMITS = {400: 1, 40: 2, 16: 4}
"""Tokens of a pass at most, and how many passes one rank has then, at the least."""


def case(limit: int) -> dict[str, Any]:
    return {
        "exercise": "kto",
        "overrides": {
            "algorithm.name": "kto",
            "algorithm.kl_coef": BETA,
            "workload.num_samples_per_prompt": 2,
            "workload.num_prompts_per_step": 8,
            "workload.max_prompt_len": 8,
            "workload.max_response_len": 8,
            "training.zero_stage": 0,
            "training.dtype": "float32",
            "training.max_tokens_per_micro_batch": limit,
        },
    }


@pytest.fixture(scope="module")
def compute_with_trl() -> tuple[float, float, dict[str, list[float]]]:
    """TRL's loss and z over the whole batch, and the gradient of each parameter of the model in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = answers()
    model = AutoModelForCausalLM.from_pretrained(make_job().policy.path, dtype=torch.float32)
    width = max(len(row["response"]) for row in rows)
    logprobs, references = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    each = []
    for index, row in enumerate(rows):
        tokens = torch.tensor([row["prompt"] + row["response"]])
        whole = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        each.append(torch.nn.functional.pad(whole[len(row["prompt"]) - 1 :], (0, width - len(row["response"]))))
        references[index, : len(row["response"])] = torch.tensor(row["reference"])
    logprobs = torch.stack(each)
    judged = [index for index, row in enumerate(rows) if row["label"]]
    others = [index for index, row in enumerate(rows) if not row["label"]]
    apart = logprobs[others].sum(1).detach(), references[others].sum(1)
    good = [rows[index]["label"] > 0 for index in judged]
    loss = trl_code.kto_loss(logprobs[judged], references[judged], apart, good, beta=BETA)
    loss.backward()
    gradients = {name: p.grad.double().flatten()[::EVERY].tolist() for name, p in model.named_parameters()}
    return float(loss.detach()), max(0.0, float((apart[0] - apart[1]).mean())), gradients


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_kto_s_gradient_is_trl_s_over_the_whole_batch_with_any_number_of_passes_and_ranks(
    num_ranks: int, tmp_path: Any, compute_with_trl: tuple[float, float, dict[str, list[float]]]
) -> None:
    loss, baseline, gradients = compute_with_trl
    assert baseline > 0.1, "at 0 the bound would hide differences"
    measured = exercise(num_ranks, {str(limit): case(limit) for limit in LIMITS}, tmp_path)
    for limit, least in LIMITS.items():
        ranks = measured[str(limit)]
        assert ranks[0]["passes"] >= (least if num_ranks == 1 else 1)
        assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss, abs=1e-5)
        assert all(rank["baseline"] == pytest.approx(baseline, rel=1e-5) for rank in ranks)
        largest = max(abs(value) for values in gradients.values() for value in values)
        for name, values in gradients.items():
            assert ranks[0]["gradients"][name] == pytest.approx(values, rel=1e-4, abs=1e-5 * largest), (limit, name)
