"""ChatTurns: the tokens between two turns of the policy, as its chat template writes them.

The policy's own tokens are never re-encoded from text. The template renders a placeholder in their place, and only the
text after the placeholder is kept. The template therefore cannot change earlier turns, for example drop their reasoning
or trim spaces.

In: the messages after a turn of the policy. Out: token ids from the end of that turn to the start of the next.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.data.loading import open_chats
from rlplan.runtime.data.text_tokens import TextTokenizer, read_end_tokens

Message = dict[str, Any]
PLACEHOLDER = "rlplan's stand-in for a turn"
"""Placeholder for the policy's turn in the rendered chat."""


class ChatTurns:
    """See the module docstring. tools: schemas of the tools that the policy may call. `close` ends the process.

    has_tools: whether `tools` may change.
    """

    def __init__(
        self, folder: Path, words: TextTokenizer, tools: Sequence[Any] = (), *, has_tools: bool = False
    ) -> None:
        self.folder, self.words, self.tools = folder, words, tools
        self.ends: Collection[int] = read_end_tokens(folder)
        self.text = open_chats(folder, has_tools=has_tools or bool(self.tools))

    def check(self, roles: Collection[str]) -> None:
        """Check that the template accepts messages of these roles after the policy's turn. Raises: SpecError."""
        for role in roles:
            self.encode_between([{"role": role, "name": "tool", "content": "said"}], None)

    def encode_prompt(self, chat: Sequence[Message]) -> list[int]:
        """Tokens of a chat up to the policy's next turn. Raises: SpecError."""
        return self.words.tokens(self.text.render([chat], self.tools)[0])

    def encode_between(self, messages: Sequence[Message], last: int | None) -> list[int]:
        """Tokens of messages with the template's tokens around them. last: final token of the policy's turn.

        Raises: SpecError when the template fails.
        """
        turn = [{"role": "user", "content": "said"}, {"role": "assistant", "content": PLACEHOLDER}]
        (rendered,) = self.text.render([[*turn, *messages]], self.tools)
        _, separator, after = rendered.partition(PLACEHOLDER)
        if not separator or PLACEHOLDER in after:
            raise SpecError(
                "the policy's chat template does not write an earlier turn of the policy exactly once and unchanged",
                where=str(self.folder / "chat_template.jinja"),
                rule="in multi-turn rollouts the template's text after a turn is appended to the turn's tokens",
                way_out="fix the template, or give prompts as texts (without tools and data.system_prompt)",
            )
        tokens = self.words.tokens(after)
        # the policy may have sampled the end token that the template writes after the turn
        return tokens[1:] if last in self.ends and tokens[:1] == [last] else tokens

    def close(self) -> None:
        self.text.close()
