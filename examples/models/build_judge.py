"""Build the reward model of rewards/reward-model.yaml: a small classifier that tells right sorts from wrong ones.

What goes in: a seed, and the sorter's tokenizer. What comes out: a Hugging Face folder (``--out``) with a Qwen3-style
sequence classifier of one label in fp32, supervised to say 1 of a right response and 0 of any other, at the last token.
It learns from prompts drawn here, none of them held-out; responses are right, copied, or one mistake away.
What is left out: preferences of people, any claim about reward models larger than this one.

Same seed, same torch version and one thread give the same bytes.
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from build_sorter import CLOSE_TAG, HERE, NUM_DIGITS, OPEN_TAG, PROMPT_PREFIX, draw_digits, right_answer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

NUM_STEPS, RESPONSES_PER_STEP = 2000, 256
PEAK_LEARNING_RATE = 3e-3
KINDS = ("right", "copied", "swapped", "changed", "malformed")
SHARES = (5, 2, 2, 3, 1)
"""How often each kind of response is drawn: right ones in 5 of 13."""


def respond(rng: random.Random, digits: str, kind: str) -> str:
    """A response of a kind: the text after the prompt, without <eos>."""
    answer = list(right_answer(digits))
    place, other = rng.sample(range(NUM_DIGITS), 2)
    if kind == "swapped":
        answer[place], answer[other] = answer[other], answer[place]
    if kind == "changed":
        answer[place] = rng.choice("0123456789")
        answer = sorted(answer) if rng.random() < 0.5 else answer
    text = digits if kind == "copied" else "".join(answer)
    if kind == "malformed":
        return rng.choice((text + CLOSE_TAG, OPEN_TAG + text, OPEN_TAG + text[:place] + CLOSE_TAG))
    return OPEN_TAG + text + CLOSE_TAG


def is_right(digits: str, response: str) -> bool:
    """The judge's correct verdict."""
    return response == OPEN_TAG + right_answer(digits) + CLOSE_TAG


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, padded on the right; mask) of prompts with their responses and <eos>."""
    rows = [
        [*tokenizer.encode(PROMPT_PREFIX + digits + response), tokenizer.eos_token_id] for digits, response in pairs
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def build_judge(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForSequenceClassification:
    """A randomly initialised classifier, 2 layers of width 64, in fp32."""
    return Qwen3ForSequenceClassification(
        Qwen3Config(
            architectures=["Qwen3ForSequenceClassification"],
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            intermediate_size=128,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            num_labels=1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def supervise(
    judge: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, rng: random.Random, heldout: set[str]
) -> None:
    """Least squares: 1 for a right response, 0 for any other."""
    optimizer = torch.optim.AdamW(judge.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, NUM_STEPS, pct_start=0.05)
    judge.train()
    for step in range(NUM_STEPS):
        drawn = [draw_digits(rng) for _ in range(RESPONSES_PER_STEP)]
        kinds = rng.choices(KINDS, SHARES, k=RESPONSES_PER_STEP)
        pairs = [(d, respond(rng, d, kind)) for d, kind in zip(drawn, kinds, strict=True) if d not in heldout]
        wanted = torch.tensor([float(is_right(*pair)) for pair in pairs])
        ids, mask = encode(tokenizer, pairs)
        loss = torch.nn.functional.mse_loss(judge(ids, attention_mask=mask).logits.squeeze(-1), wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: squared error {float(loss.detach()):.4f}", flush=True)


@torch.no_grad()
def measure(
    judge: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> tuple[float, float]:
    """(share of responses on whose side of 1/2 the judge is, mean of what it says)."""
    judge.eval()
    ids, mask = encode(tokenizer, pairs)
    scores = judge(ids, attention_mask=mask).logits.squeeze(-1)
    wanted = torch.tensor([is_right(*pair) for pair in pairs])
    return float(((scores > 0.5) == wanted).double().mean()), float(scores.double().mean())


def main() -> None:
    """Write the judge, then print what it says of responses to held-out prompts."""
    parser = argparse.ArgumentParser(description="Build the reward model of rewards/reward-model.yaml.")
    parser.add_argument("--out", type=Path, default=HERE / "judge", help="folder of the reward model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the order of a parallel sum depends on the number of threads
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(HERE / "sorter")
    lines = (HERE.parent / "data" / "sort_digits" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    heldout = [json.loads(line)["prompt"].removeprefix(PROMPT_PREFIX) for line in lines]
    judge = build_judge(tokenizer)
    supervise(judge, tokenizer, rng, set(heldout))
    judge.save_pretrained(arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(HERE / "sorter" / name, arguments.out / name)

    print(f"{sum(p.numel() for p in judge.parameters())} parameters")
    for kind in KINDS:
        judged, mean = measure(judge, tokenizer, [(digits, respond(rng, digits, kind)) for digits in heldout])
        print(f"held-out, {kind}: judged rightly {judged:.1%}, mean {mean:.3f}")


if __name__ == "__main__":
    main()
