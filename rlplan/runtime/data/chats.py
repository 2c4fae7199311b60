"""Chats: messages made one text by a model's chat template; a process of its own.

In: JSON on the standard input: chats, the model's folder, the template, what tokenizer_config.json holds. Out: a JSON
list of texts.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import PreTrainedTokenizerFast

    folder, config = Path(request["folder"]), request["config"]
    special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(name)}
    tokens = {name: value if isinstance(value, str) else value["content"] for name, value in special.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **tokens)
    texts = [
        tokenizer.apply_chat_template(
            chat, chat_template=request["template"], tokenize=False, add_generation_prompt=True
        )
        for chat in request["chats"]
    ]
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        json.dump(texts, out)


if __name__ == "__main__":
    main()
