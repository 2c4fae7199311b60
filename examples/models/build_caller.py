"""Build the start policy and the data of the tool job: say what stands under a code, which only a tool knows.

What goes in: a seed. What comes out: a Hugging Face folder (``--out``) with a Qwen3-style policy of about 0.15 M
parameters, its tokenizer and its chat template, and two JSONL files (``--data-out``) of prompts that share no row.
The policy is supervised on demonstrations of mixed quality: it knows how to call the tool and to say what it hears, and
mostly guesses instead. Now and then a call is broken, or asks for a tool that there is not.

Same seed, same torch version and one thread give the same bytes.
"""

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from build_sorter import PLAIN_CHARACTERS, save_folder  # noqa: E402

SPECIAL = ["<pad>", "<|end|>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PAD, END, UNK = SPECIAL[:3]
CALL, NO_SUCH, CALLED = '{"name": "look_up", "arguments": {"code": "', '{"name": "find", "arguments": {"code": "', '"}}'
WORDS = ["<tool_call>", "</tool_call>", "<answer>", "</answer>", "look_up", "error: ", CALL, NO_SUCH, CALLED]
TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | map(attribute='function.name') | join(' ') }}<|end|>{% endif %}"
    "{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TRAIN_ROWS, NUM_HELDOUT_ROWS = 1024, 256
# As of the sorter: which prompts are answered with a call depends on their last digit, so that greedy decoding calls
# for about a third of them, and sampling finds a call for all.
WILLING_LAST_DIGITS = "012"
CALL_SHARE_WILLING, CALL_SHARE_RELUCTANT, BROKEN_SHARE = 0.75, 0.27, 0.05
NUM_SUPERVISED_STEPS, BATCH, PEAK_LEARNING_RATE, MAX_LEN = 800, 128, 3e-3, 40
IGNORED_LABEL = -100


def load_tool() -> object:
    """The tool that the job names."""
    spec = importlib.util.spec_from_file_location("look_up", HERE.parent / "environments" / "look_up.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.look_up


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: marks of turns, the parts of a call, and single characters."""
    words = [*SPECIAL, *WORDS, *PLAIN_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    pattern = "|".join(word.translate({ord(c): "\\" + c for c in '{}"()|'}) for word in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        model_max_length=256,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_policy(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialised Qwen3 policy, 3 layers of width 64, in fp32."""
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
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


def demonstrate(rng: random.Random, code: str) -> list[tuple[list[str], bool]]:
    """A whole chat as (words, whether the policy says them)."""
    prompt = (["<|system|>", "look_up", END, "<|user|>", *code, END, "<|assistant|>"], False)
    call_share = CALL_SHARE_WILLING if code[-1] in WILLING_LAST_DIGITS else CALL_SHARE_RELUCTANT
    entry = f"{rng.randrange(1000):03}"
    answer = (["<answer>", *entry, "</answer>", END], True)
    if rng.random() >= call_share:
        return [prompt, answer]
    if rng.random() < BROKEN_SHARE:
        opening, closing = rng.choice([(CALL, []), (NO_SUCH, [CALLED])])
        tool_answer = ["error: "]
    else:
        opening, closing, tool_answer = CALL, [CALLED], list(entry)
    call = (["<tool_call>", opening, *code, *closing, "</tool_call>", END], True)
    return [prompt, call, (["<|tool|>", *tool_answer, END, "<|assistant|>"], False), answer]


def draw_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, withheld: set[str]) -> list[torch.Tensor]:
    """Token ids and labels of one batch of demonstrations, ``[batch, MAX_LEN]`` each."""
    rows: list[list[list[int]]] = [[], []]
    ids = tokenizer.get_vocab()
    while len(rows[0]) < BATCH:
        code = f"{rng.randrange(100_000):05}"
        if code in withheld:
            continue
        tokens: list[int] = []
        labels: list[int] = []
        for words, is_said in demonstrate(rng, code):
            part = [ids[word] for word in words]
            tokens += part
            labels += part if is_said else [IGNORED_LABEL] * len(part)
        num_padding = MAX_LEN - len(tokens)
        rows[0].append(tokens + [tokenizer.pad_token_id] * num_padding)
        rows[1].append(labels + [IGNORED_LABEL] * num_padding)
    return [torch.tensor(each) for each in rows]


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
def measure(policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, codes: list[str]) -> tuple[float, float]:
    """Share of codes that are answered greedily with a right call, and of entries that are then said right."""
    policy.eval()

    def said(texts: list[str], most: int) -> list[str]:
        prompts = torch.tensor([tokenizer.encode(text) for text in texts])
        completions = policy.generate(prompts, max_new_tokens=most, do_sample=False)
        return [text.partition(END)[0] for text in tokenizer.batch_decode(completions[:, prompts.shape[1] :])]

    begun = [f"<|system|>look_up<|end|><|user|>{code}<|end|><|assistant|>" for code in codes]
    calls = [f"<tool_call>{CALL}{code}{CALLED}</tool_call>" for code in codes]
    right = [text == call for text, call in zip(said(begun, 12), calls, strict=True)]
    tool_prompts = [
        f"{b}{c}<|end|><|tool|>{code[:3]}<|end|><|assistant|>" for b, c, code in zip(begun, calls, codes, strict=True)
    ]
    copied = [text == f"<answer>{code[:3]}</answer>" for text, code in zip(said(tool_prompts, 8), codes, strict=True)]
    return sum(right) / len(codes), sum(copied) / len(codes)


def main() -> None:
    """Write data, tokenizer, template and policy, then print what the start policy can do."""
    parser = argparse.ArgumentParser(description="Build the tool job's start policy and data.")
    parser.add_argument("--out", type=Path, default=HERE / "caller", help="folder of the policy")
    parser.add_argument("--data-out", type=Path, default=HERE.parent / "data" / "look_up", help="folder of rows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the order of a parallel sum depends on the number of threads
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    look_up = load_tool()
    codes = [f"{number:05}" for number in rng.sample(range(100_000), NUM_TRAIN_ROWS + NUM_HELDOUT_ROWS)]
    heldout = codes[NUM_TRAIN_ROWS:]
    for name, part in (("train", codes[:NUM_TRAIN_ROWS]), ("heldout", heldout)):
        path = arguments.data_out / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"id": f"{name}-{i:04}", "prompt": code, "answer": look_up(code)} for i, code in enumerate(part)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer)
    last_loss = supervise(policy, tokenizer, rng, set(heldout))
    save_folder(arguments.out, policy, tokenizer)
    (arguments.out / "chat_template.jinja").write_text(TEMPLATE + "\n", "utf-8")
    called, copied = measure(policy, tokenizer, heldout)
    print(f"{sum(p.numel() for p in policy.parameters())} parameters, last supervised loss {last_loss:.3f}")
    print(f"held-out, greedy: right calls {called:.1%}, entries said right {copied:.1%}")


if __name__ == "__main__":
    main()
