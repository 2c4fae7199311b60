"""ModelText: runs a model's tokenizer and chat template in a child process with limits.

Neither file can be trusted: a tokenizer of a few bytes can use gigabytes or abort its process, and a template can loop
forever. The driver also needs no memory for the libraries and the tokenizer. Run as a module, this file is the child
process, which speaks JSON line by line.

In: a folder; texts and chats. Out: token ids and texts.
"""

import base64
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlplan.containment import Budget, enter_containment
from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import BadRowError, make_printable
from rlplan.runtime.images.decoding import BadImageError, decode
from rlplan.runtime.processes.answer_channel import AnswerChannel
from rlplan.runtime.processes.line_process import START_S, Deadline, LineProcess, NoAnswerError
from rlplan.runtime.processes.machine_speed import wait_patiently
from rlplan.runtime.processes.safe_path import make_module_command
from rlplan.spec.models.families.image_sizes import ImageRule

MORE_BYTES = 1 << 31
"""Memory limit on top of the libraries: the largest published tokenizers take about 500 MB while they load."""
ANSWER_S = 10.0
"""Seconds for one text or chat; scaled by machine speed, like START_S for the first answer."""
MAX_ANSWER_BYTES = 1 << 24
TEMPLATE_RULE = "a chat template that takes messages with role and content"
TOKENIZER_RULE = "a tokenizer.json of the tokenizers library, which takes at most 2 GiB and 10 s a text"


class ModelText:
    """See the module docstring; usable as a context manager. template: chat template of the folder, if chats occur.

    is_usable: whether the process has answered everything so far.
    """

    def __init__(self, folder: Path, template: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        self.folder, self.is_usable = folder, True
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # each thread and each arena of glibc maps more memory, which counts against the limit
        variables = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        command = make_module_command("rlplan.runtime.data.model_text")
        self._process = LineProcess(
            command, self._log, MAX_ANSWER_BYTES, os.environ | variables | {"HF_HUB_OFFLINE": "1"}
        )
        try:
            start = {"folder": str(folder), "template": template, "config": dict(config or {})}
            self.longest_token = int(self._ask(start, START_S, is_chat=template is not None)["longest_token"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ModelText":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.close()
        self._log.close()

    def tokens(self, text: str, *, adds_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text. Raises: SpecError when the tokenizer fails."""
        return tuple(self._ask({"text": text, "special": adds_special_tokens}, ANSWER_S, is_chat=False)["tokens"])

    def image(self, data: bytes, rule: ImageRule) -> tuple[int, int, bytes]:
        """(token rows, token columns, pixels) of an image file. Raises: BadRowError if it is not an image."""
        request = {"image": base64.b64encode(data).decode(), "rule": asdict(rule)}
        try:
            answer = self._exchange(request, ANSWER_S)
        except NoAnswerError as error:
            raise self._make_error(
                f"an image ended its process: {error}{self._read_last_words()}", is_chat=False
            ) from None
        if "error" in answer:
            raise BadRowError(
                str(answer["error"]).removeprefix(f"{BadImageError.__module__}.{BadImageError.__name__}: ")
            )
        return answer["rows"], answer["columns"], base64.b64decode(answer["pixels"])

    def special(self, token: int) -> str:
        """Text of a token of the vocabulary."""
        return str(self._ask({"id": token}, ANSWER_S, is_chat=False)["text"])

    def render(self, chats: Sequence[Any], tools: Sequence[Any] = ()) -> list[str]:
        """Render chats up to the policy's next turn. tools: tool schemas. Raises: SpecError when the template fails."""
        requests = [{"chat": chat, "tools": list(tools)} for chat in chats]
        return [str(self._ask(request, ANSWER_S, is_chat=True)["text"]) for request in requests]

    @property
    def pid(self) -> int:
        return self._process.pid

    def _exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The process's answer, which may be an error. Raises: NoAnswerError."""
        # Sending blocks while the process still starts, so it has the longer deadline.
        self._process.send(json.dumps(request), Deadline(START_S))
        return wait_patiently(lambda wait: self._process.receive(Deadline(wait)), seconds, NoAnswerError)

    def _ask(self, request: dict[str, Any], seconds: float, *, is_chat: bool) -> dict[str, Any]:
        try:
            answer = self._exchange(request, seconds)
        except NoAnswerError as error:
            self.is_usable = False  # a late answer would be taken for that to the next request
            raise self._make_error(f"{error}{self._read_last_words()}", is_chat=is_chat) from None
        if "error" in answer:
            raise self._make_error(str(answer["error"]), is_chat=is_chat)
        return answer

    def _read_last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def _make_error(self, why: str, *, is_chat: bool) -> SpecError:
        file = "chat_template.jinja" if (self.folder / "chat_template.jinja").exists() else "tokenizer_config.json"
        if is_chat:
            return SpecError(
                f"the policy's chat template cannot render the prompts: {make_printable(why)}",
                where=str(self.folder / file),
                rule=TEMPLATE_RULE,
                way_out="fix the template, or give prompts as texts",
            )
        return SpecError(
            f"the tokenizer cannot be read: {make_printable(why)}",
            where=str(self.folder / "tokenizer.json"),
            rule=TOKENIZER_RULE,
            way_out="copy the model's tokenizer there again",
        )


class _Answers:
    """The child's side: it loads the tokenizer and answers requests."""

    def __init__(self, folder: Path, template: str | None, config: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        if template is not None:
            from transformers import PreTrainedTokenizerFast
        enter_containment(
            Budget(memory_bytes=MORE_BYTES)
        )  # after the imports, which are trusted, and before the first file of the model
        self.tokenizer, self.template = Tokenizer.from_file(str(folder / "tokenizer.json")), template
        if template is not None:
            names = ("bos_token", "eos_token", "pad_token", "unk_token")
            special = {name: config[name] for name in names if config.get(name)}
            tokens = {name: value if isinstance(value, str) else value["content"] for name, value in special.items()}
            self.chats = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **tokens)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "chat" in request:
            text = self.chats.apply_chat_template(
                request["chat"],
                tools=request["tools"] or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=True,
            )
            return {"text": text}
        if "image" in request:
            return decode(base64.b64decode(request["image"]), ImageRule(**request["rule"]))
        if "id" in request:
            return {"text": self.tokenizer.id_to_token(request["id"])}
        return {"tokens": self.tokenizer.encode(request["text"], add_special_tokens=request["special"]).ids}


def main() -> None:
    """Answer until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and ends this process
    channel = AnswerChannel()
    answers: _Answers | None = None
    for line in channel.requests:
        request = json.loads(line)
        try:
            if answers is None:
                answers = _Answers(Path(request["folder"]), request["template"], request["config"])
                answer: dict[str, Any] = {"longest_token": max(map(len, answers.tokenizer.get_vocab()), default=1)}
            else:
                answer = answers.answer(request)
            channel.send(answer)
        except BaseException as error:  # a Rust panic in the tokenizer is not an Exception
            channel.send({"error": f"{type(error).__module__}.{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
