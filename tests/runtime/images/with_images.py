"""A small vision-language model with its processor, and a job whose answers are the colours of images."""

import json
from pathlib import Path
from typing import Any

from tests.factories import write_job
from tests.runtime.runs.architectures import SIZES, WITH_TOWERS

WORDS = ("<pad>", "<eos>", "<bos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<unk>")
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
IMAGE_TOKEN = WORDS.index("<|image_pad|>")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 16,
}


def write_with_processor(folder: Path) -> None:
    """Qwen2.5-VL with random weights, a tokenizer of words and a processor in a folder."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration as Whole

    text, tower = WITH_TOWERS[Whole.__name__]
    torch.manual_seed(1)
    special = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": IMAGE_TOKEN, "video_token_id": 6}
    config = Whole.config_class(
        text_config=SIZES | text, vision_config=tower | {"fullatt_block_indexes": [0]}, **special
    )
    model = Whole._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = [*WORDS, *COLORS, "color", "?"]
    words += [f"w{number}" for number in range(SIZES["vocab_size"] - len(words))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in WORDS])
    tokenizer.save(str(folder / "tokenizer.json"))
    named: dict[str, Any] = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def image_job(folder: Path, **overrides: Any) -> Path:
    """A job file: three GRPO steps over images of one colour, the name of which is the right answer."""
    from PIL import Image

    write_with_processor(folder / "model")
    rows = []
    for number in range(24):
        name, color = list(COLORS.items())[number % len(COLORS)]
        shade = tuple(min(255, max(0, part + (number * 7) % 31 - 15)) for part in color)
        Image.new("RGB", (56 + 28 * (number % 3), 56), shade).save(folder / f"{number}.png")
        rows.append({"id": str(number), "prompt": "<image> color ?", "answer": name, "image": f"{number}.png"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-8]))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[-8:]))
    job: dict[str, Any] = {
        "policy": {"path": str(folder / "model")},
        "hardware": {"num_devices": 1},
        "algorithm": {"kl_coef": 0, "learning_rate": 1e-3},
        "workload": {
            "num_steps": 3,
            "evaluate_every": 3,
            "num_heldout_prompts": 8,
            "max_prompt_len": 32,
            "max_response_len": 8,
        },
        "rollout": {"kv_cache_memory": "16MiB", "max_num_seqs": 16},
        "data": {"prompts": "train.jsonl", "heldout": "heldout.jsonl", "image_column": "image"},
        "rewards": [{"kind": "format_checker", "pattern": "(?s)w[0-9]*[0-4]( .*)?"}],
    }
    return write_job(folder, **job, **overrides)
