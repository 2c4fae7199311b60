"""Build the start policy and the data of the quickstart job: sort five digits.

What goes in: a seed. What comes out: a Hugging Face folder (``--out``) with a Qwen3-style policy of about
0.8 M parameters and its tokenizer, and two JSONL files (``--data-out``) of prompts that share no row.
The policy is supervised on demonstrations of mixed quality, so it knows how to sort but mostly chooses not to:
that leaves reinforcement learning a choice to reward, and a lift that shows within minutes on a CPU.
What is left out: a chat template, a pretrained corpus, any claim about policies larger than this one.

Same seed, same torch version and one thread give the same bytes.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
OPEN_TAG, CLOSE_TAG, PROMPT_PREFIX = "<answer>", "</answer>", "Sort: "
# Digits first among the plain characters; the rest is there only so that odd input survives encoding.
PLAIN_CHARACTERS = "0123456789 \nabcdefghijklmnopqrstuvwxyz.,:;!?'\"-+*/=()[]<>_"

NUM_DIGITS = 5
NUM_TRAIN_ROWS, NUM_HELDOUT_ROWS = 2000, 256

# Share of right demonstrations. It depends on the prompt's last digit: were it 40 % everywhere, greedy decoding
# would always copy and the start accuracy would be 0. So sorting is the likelier response to about a quarter of
# the prompts, and to every other prompt it is a minority that sampling still finds.
WILLING_LAST_DIGITS = "012"
RIGHT_SHARE_WILLING, RIGHT_SHARE_RELUCTANT = 0.75, 0.27
MALFORMED_SHARE = 0.05

NUM_SUPERVISED_STEPS = 600
DEMONSTRATIONS_PER_STEP = 128
PEAK_LEARNING_RATE = 2e-3
IGNORED_LABEL = -100
MAX_RESPONSE_LEN = 12


def right_answer(digits: str) -> str:
    """The digits in ascending order: ``52914`` gives ``12459``."""
    return "".join(sorted(digits))


def draw_digits(rng: random.Random) -> str:
    """Five random digits that are not already in order, so that copying never earns the reward."""
    while True:
        digits = "".join(rng.choice("0123456789") for _ in range(NUM_DIGITS))
        if digits != right_answer(digits):
            return digits


def draw_prompt_sets(rng: random.Random) -> tuple[list[str], list[str]]:
    """Digits of the train rows and of the held-out rows; no string occurs twice in the two together."""
    drawn: dict[str, None] = {}  # a dict, not a set: its order is the order of drawing
    while len(drawn) < NUM_TRAIN_ROWS + NUM_HELDOUT_ROWS:
        drawn[draw_digits(rng)] = None
    ordered = list(drawn)
    return ordered[:NUM_TRAIN_ROWS], ordered[NUM_TRAIN_ROWS:]


def write_rows(path: Path, name: str, rows: list[str]) -> None:
    """Write one JSON object per line: id, prompt, answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for index, digits in enumerate(rows):
            row = {"id": f"{name}-{index:04d}", "prompt": PROMPT_PREFIX + digits, "answer": right_answer(digits)}
            file.write(json.dumps(row) + "\n")


def write_pairs(path: Path, rows: list[str]) -> None:
    """Write one JSON object per line: id, prompt, the sorted digits as chosen, the copied ones as rejected."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for index, digits in enumerate(rows):
            answers = {"chosen": right_answer(digits), "rejected": digits}
            tagged = {name: f"{OPEN_TAG}{answer}{CLOSE_TAG}" for name, answer in answers.items()}
            file.write(json.dumps({"id": f"pair-{index:04d}", "prompt": PROMPT_PREFIX + digits, **tagged}) + "\n")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose words are the tags, the prompt prefix and single characters.

    The tags are ordinary words, not special tokens, so ``skip_special_tokens`` keeps them for the format checker.
    ``Fuse`` joins the decoded tokens without a space between them.
    """
    words = [PAD, EOS, UNK, OPEN_TAG, CLOSE_TAG, PROMPT_PREFIX, *PLAIN_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    pattern = Regex(f"{PROMPT_PREFIX}|{OPEN_TAG}|{CLOSE_TAG}|[\\s\\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=256,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_policy(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 policy, 4 layers of width 128, in fp32."""
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    policy = Qwen3ForCausalLM(config)
    policy.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return policy


def demonstrate(rng: random.Random, digits: str) -> str:
    """One demonstrated response: right or merely copied, and now and then without its closing tag."""
    right_share = RIGHT_SHARE_WILLING if digits[-1] in WILLING_LAST_DIGITS else RIGHT_SHARE_RELUCTANT
    content = right_answer(digits) if rng.random() < right_share else digits
    closing = "" if rng.random() < MALFORMED_SHARE else CLOSE_TAG
    return OPEN_TAG + content + closing


def draw_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, withheld: set[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of one batch of demonstrations, ``[batch, prompt_len + response_len]`` each.

    Held-out prompts are never demonstrated. Prompts and padding carry no loss.
    """
    inputs, labels = [], []
    max_len = 1 + NUM_DIGITS + 1 + NUM_DIGITS + 2
    while len(inputs) < DEMONSTRATIONS_PER_STEP:
        digits = draw_digits(rng)
        if digits in withheld:
            continue
        prompt = tokenizer.encode(PROMPT_PREFIX + digits)
        response = [*tokenizer.encode(demonstrate(rng, digits)), tokenizer.eos_token_id]
        num_padding = max_len - len(prompt) - len(response)
        inputs.append(prompt + response + [tokenizer.pad_token_id] * num_padding)
        labels.append([IGNORED_LABEL] * len(prompt) + response + [IGNORED_LABEL] * num_padding)
    return torch.tensor(inputs), torch.tensor(labels)


def supervise(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, withheld: set[str]
) -> float:
    """Train the policy on fresh demonstrations, one-cycle learning rate; returns the last loss."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=NUM_SUPERVISED_STEPS)
    policy.train()
    for _ in range(NUM_SUPERVISED_STEPS):
        inputs, labels = draw_batch(rng, tokenizer, withheld)
        loss = policy(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


@torch.inference_mode()
def measure(
    policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[str], greedy: bool = True
) -> tuple[float, float]:
    """Share of rows whose response is right, and share whose response is well formed."""
    policy.eval()
    # Every prompt has the same length, so the batch needs no padding.
    prompts = torch.tensor([tokenizer.encode(PROMPT_PREFIX + digits) for digits in rows])
    sampling = {} if greedy else {"temperature": 1.0, "top_k": 0}
    generated = policy.generate(prompts, max_new_tokens=MAX_RESPONSE_LEN, do_sample=not greedy, **sampling)
    responses = tokenizer.batch_decode(generated[:, prompts.shape[1] :], skip_special_tokens=True)
    num_right = sum(
        response == OPEN_TAG + right_answer(digits) + CLOSE_TAG
        for digits, response in zip(rows, responses, strict=True)
    )
    num_formed = sum(response.startswith(OPEN_TAG) and response.endswith(CLOSE_TAG) for response in responses)
    return num_right / len(rows), num_formed / len(rows)


def save_folder(folder: Path, policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write policy and tokenizer as one Hugging Face folder."""
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 lacks; both know this one.
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Where to write, and the seed."""
    parser = argparse.ArgumentParser(description="Build the quickstart job's start policy and data.")
    parser.add_argument("--out", type=Path, default=HERE / "sorter", help="folder of the policy")
    parser.add_argument("--data-out", type=Path, default=HERE.parent / "data" / "sort_digits", help="folder of rows")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write data, tokenizer and policy, then print what the start policy can do."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the order of a parallel sum depends on the number of threads
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)

    train_rows, heldout_rows = draw_prompt_sets(rng)
    write_rows(arguments.data_out / "train.jsonl", "train", train_rows)
    write_rows(arguments.data_out / "heldout.jsonl", "heldout", heldout_rows)
    write_pairs(arguments.data_out / "pairs.jsonl", train_rows)

    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer)
    last_loss = supervise(policy, tokenizer, rng, set(heldout_rows))
    save_folder(arguments.out, policy, tokenizer)

    print(f"{sum(p.numel() for p in policy.parameters())} parameters, last supervised loss {last_loss:.3f}")
    for name, greedy in (("greedy", True), ("sampled", False)):
        right, formed = measure(policy, tokenizer, heldout_rows, greedy)
        print(f"held-out, {name}: right {right:.1%}, well formed {formed:.1%}")


if __name__ == "__main__":
    main()
