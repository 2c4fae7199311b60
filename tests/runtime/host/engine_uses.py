"""The names of vLLM, DeepSpeed, Ray and torch.cuda in the runtime's source.

In: Python files. Out: names such as `vllm.lora.request:LoRARequest` or `torch.cuda:Event`. Objects of the engines are
known by what the runtime calls them (OBJECTS). Left out: attributes of results.
"""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOTS = ("vllm", "deepspeed", "ray", "torch.cuda", "torch.nn.attention")
OBJECTS = {
    "llm": "vllm:LLM",
    "llm_engine": "vllm.v1.engine.llm_engine:LLMEngine",
    "engine": "deepspeed.runtime.engine:DeepSpeedEngine",
}


def uses_in(folder: Path) -> dict[str, str]:
    """Every use with a file that has it."""
    return {use: path.name for path in sorted(folder.rglob("*.py")) for use in uses_of(path.read_text("utf-8"))}


def uses_of(source: str) -> Iterator[str]:
    """
    >>> sorted(uses_of("import ray\\nfrom vllm import LLM\\nray.util.get()\\ntorch.cuda.Event()\\nself.llm.sleep(1)"))
    ['ray.util:get', 'torch.cuda:Event', 'vllm:LLM', 'vllm:LLM.sleep']
    """
    tree = ast.parse(source)
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_of_an_engine(node.module):
            yield from (f"{node.module}:{entry.name}" for entry in node.names)
        elif isinstance(node, ast.Attribute) and node not in inner:
            yield from _named(_chain(node))
        elif isinstance(node, ast.Attribute):
            chain = _chain(node)
            yield from (f"{OBJECTS[a]}.{b}" for a, b in pairwise(chain) if a in OBJECTS and a != b)


def _named(chain: list[str]) -> Iterator[str]:
    dotted = ".".join(chain)
    if _is_of_an_engine(dotted) and len(chain) > 1:
        module, _, name = dotted.rpartition(".")
        yield f"{module}:{name}"
    yield from (f"{OBJECTS[a]}.{b}" for a, b in pairwise(chain) if a in OBJECTS)


def _is_of_an_engine(dotted: str) -> bool:
    return any(dotted == root or dotted.startswith(f"{root}.") for root in ROOTS)


def _chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`, outermost first; empty words for what is no name."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]
