"""An agent with two tools, for any OpenAI endpoint: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the model.

It says what stands under a code. `python examples/agents/clerk.py 50494` asks without rlplan.
"""

import json
import os
import sys
from pathlib import Path

from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "environments"))
from look_up import look_up


def find(code: str) -> str:
    return "use look_up" if code.isdigit() else "none"


FUNCTIONS = {"look_up": look_up, "find": find}
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CODE}} for name in FUNCTIONS]


def run(prompt: list[dict[str, str]]) -> str:
    """Answers a chat. The model may call tools twice before it has to answer."""
    client, messages = OpenAI(), list(prompt)
    for _ in range(3):
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            try:
                text = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            except (ValueError, TypeError, KeyError) as error:
                text = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        if not message.tool_calls:
            break
    return message.content or ""


if __name__ == "__main__":
    print(run([{"role": "user", "content": sys.argv[1]}]))
