"""A policy's folder with a chat template, whose tokenizer does not round-trip; and engines that repeat a script.

`a` and `b` are tokens, and so is `ab`: what decodes to `ab` may have been sampled as two tokens.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rlplan.runtime.measure.memory_meter import Measurement
from rlplan.runtime.rollout.experience import Completion, FinishedRequest, Prompt, RolloutRequest, WeightSpan

SPECIAL = ("<pad>", "<end>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>", "<bos>")
WORDS = ("ab", "a", "b", "<call>", "</call>", *'{}":,[] 0123456789cdefghijklmnopqrstuvwxyz_.')
IDS = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
END = IDS["<end>"]
TEMPLATE = (
    "<bos>{% for tool in tools or [] %}<system>{{ tool.function.name }}<end>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_policy(folder: Path, template: str | None = TEMPLATE) -> Path:
    """The folder, with what tokenizes and no weights. template: None for none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<call>|</call>|ab|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def ids(*words: str) -> tuple[int, ...]:
    """Token ids of words; a word outside the vocabulary is split into letters."""
    return tuple(IDS[part] for word in words for part in ([word] if word in IDS else word))


def chat_prompt(text: str = "ab") -> Prompt:
    chat = [{"role": "user", "content": text}]
    return Prompt("p", text, "42", ids("<bos>", "<user>", text, "<end>", "<assistant>"), chat=json.dumps(chat))


class Script:
    """Stands for the engines: turn t of every sample has the tokens of `turns[t]`, the last again and again."""

    processes = ("rollout_engine/0",)

    def __init__(self, *turns: Sequence[int]) -> None:
        self.turns = turns
        self.asked: list[RolloutRequest] = []
        self._waiting: list[RolloutRequest] = []

    def submit(self, requests: Sequence[RolloutRequest], timeout_s: float) -> None:
        self.asked += requests
        self._waiting += requests

    def collect(
        self, max_wait_s: float, at_least: int, timeout_s: float
    ) -> tuple[list[FinishedRequest], list[Measurement]]:
        if not self._waiting:
            time.sleep(max_wait_s)  # as engines do: who waits for an environment would compute meanwhile
        done, self._waiting = self._waiting, []
        return [self._answer(request) for request in done], []

    def end_session(self, session: str) -> None:
        """Nothing is kept."""

    def _answer(self, request: RolloutRequest) -> FinishedRequest:
        turn = int(request.id.rpartition(".")[2])
        tokens = tuple(self.turns[min(turn, len(self.turns) - 1)])[: request.max_tokens]
        reason = "stop" if tokens[-1] == END else "length"
        spans = (WeightSpan(0, 0, len(tokens)),)
        return FinishedRequest(request.id, (Completion(tokens, (-1.0,) * len(tokens), reason, spans),))
