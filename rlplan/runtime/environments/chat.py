"""ChatTurns: the tokens between two turns of the policy's, as its chat template writes them.

In: what was said to the policy after its turn. Out: token ids from where that turn ended to where the next begins. The
policy's own tokens are never made anew of their text: a template is shown a stand-in for them, and what it writes after
that is what is kept. So what it would make of earlier turns (dropping their thoughts, trimming spaces) does not happen.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import SpecError
from rlplan.runtime.data.loading import open_chats
from rlplan.runtime.data.text_tokens import TextTokenizer, end_tokens

Message = dict[str, Any]
STAND_IN = "rlplan's stand-in for a turn"
"""Said by the policy in what the template is shown."""


class ChatTurns:
    """See the module docstring. tools: schemas of what the policy may call. `close` ends the template's process."""

    def __init__(self, folder: Path, words: TextTokenizer, tools: Sequence[Any] = ()) -> None:
        self.folder, self.words, self.tools = folder, words, tools
        self.ends: Collection[int] = end_tokens(folder)
        self.text = open_chats(folder, has_tools=bool(self.tools))

    def check(self, roles: Collection[str]) -> None:
        """See that the template takes messages of these roles after the policy's. Raises: SpecError."""
        for role in roles:
            self.encode_between([{"role": role, "name": "tool", "content": "said"}], None)

    def encode_prompt(self, chat: Sequence[Message]) -> list[int]:
        """Tokens of a chat up to where the policy speaks. Raises: SpecError."""
        return self.words.tokens(self.text.rendered([chat], self.tools)[0])

    def encode_between(self, messages: Sequence[Message], last: int | None) -> list[int]:
        """Tokens of what was said, with all around it. last: the token that the policy's turn has ended with.

        Raises: SpecError where the template fails.
        """
        turn = [{"role": "user", "content": "said"}, {"role": "assistant", "content": STAND_IN}]
        (whole,) = self.text.rendered([[*turn, *messages]], self.tools)
        _, found, after = whole.partition(STAND_IN)
        if not found or STAND_IN in after:
            raise SpecError(
                "the policy's chat template does not write an earlier turn of the policy once, as it was said",
                where=str(self.folder / "chat_template.jinja"),
                rule="in rollouts of several turns what the template writes after a turn is appended to its tokens",
                way_out="mend the template, or give prompts as texts (without tools and data.system_prompt)",
            )
        tokens = self.words.tokens(after)
        return tokens[1:] if last in self.ends and tokens[:1] == [last] else tokens

    def close(self) -> None:
        self.text.close()
