"""An agent with two tools, written for the `openai` client as it would be for any endpoint: it knows nothing of rlplan.

OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the policy. `python clerk.py 50494` asks whatever they name.
"""

import json
import os
import sys
from pathlib import Path

from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[1] / "environments"))
from look_up import look_up


def find(code: str) -> str:
    return f"no entry for {code[:5]}" if len(code) < 5 else "use look_up"


CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = [{"type": "function", "function": {"name": tool.__name__, "parameters": CODE}} for tool in (look_up, find)]


def run(prompt: list[dict[str, str]]) -> str:
    """Answers a chat, with as many calls of tools as the model asks for."""
    client, messages = OpenAI(), list(prompt)
    while True:
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls or len(messages) > 4:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                text = {"look_up": look_up, "find": find}[call.function.name](**json.loads(call.function.arguments))
            except (ValueError, TypeError, KeyError) as error:
                text = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


if __name__ == "__main__":
    print(run([{"role": "user", "content": sys.argv[1]}]))
