"""The model and the prompts of the comparison with TRL: 40 M parameters, drawn at random, with a tokenizer of words.

In: a folder. Out: a Hugging Face model folder and a prompt file in it. Random weights and forced lengths: what is
compared is speed alone.
"""

import json
import random
from pathlib import Path

VOCABULARY = 32_768
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1408,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPT_LEN = 24


def write_model(folder: Path, seed: int = 0) -> None:
    """A Qwen3 of 40 M parameters in bf16, with its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """One of words that stand for themselves."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_prompts(path: Path, count: int, num_words: int = PROMPT_LEN, seed: int = 0) -> None:
    """Prompts of random words, and an answer that is a word."""
    dice = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(f"w{dice.randrange(3, VOCABULARY)}" for _ in range(number))

    rows = [{"id": str(row), "prompt": words(num_words), "answer": words(1)} for row in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
