"""Protocols: what an environment may look like, each made the same: a rollout's own object with reset, step, finish.

In: the function or class that a job names. Out: an Environment. Known are
- a function `(messages, answer)` that sees all turns anew: no object, no state;
- a class with `reset` and `step` (Gymnasium's tuples are taken);
- a class with `reset` and other methods, which the policy calls as tools, and maybe `get_reward` (TRL's
  `environment_factory`);
- an object with `env_response`, and maybe `setup_state`, `is_completed` and a `rubric` (verifiers' `MultiTurnEnv`).
A function without required arguments makes such an object (verifiers' `load_environment`). Methods may be async.
Left out: what an answer may hold, which is checked where it is heard (pool.py).
"""

import inspect
from collections.abc import Callable
from typing import Any

from rlplan.runtime.environments.tools import Tool
from rlplan.runtime.processes.awaiting import awaited
from rlplan.runtime.rewards.child import chosen, taken_by

OURS = ("reset", "step", "close", "get_reward")


def named(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    """Call it with what it takes of what there is, by name."""
    return awaited(function(**chosen(taken_by(function), offered)))


class Session:
    """One rollout's own environment: an object with `reset`."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def tool(self, name: str) -> Tool:
        return Tool(getattr(self.made, name), name)

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        """row: the prompt's columns with `prompt` and `answer`."""
        said = named(self.made.reset, row)
        return {"observation": said[0] if isinstance(said, tuple) else said}

    def step(self, action: str) -> Any:
        return as_answer(awaited(self.made.step(action)))

    def finish(self) -> dict[str, Any]:
        reward = awaited(self.made.get_reward()) if hasattr(self.made, "get_reward") else None
        if hasattr(self.made, "close"):
            awaited(self.made.close())
        return {"reward": reward}


class Turns:
    """One rollout of an environment of verifiers' kind, which keeps what it knows in a dictionary."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.messages: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        self.messages = list(row["prompt"])
        given = {"prompt": list(row["prompt"]), "answer": row["answer"], "info": row.get("info", {})}
        self.state = {**given, "task": row.get("task", ""), "completion": [], "responses": [], "turn": 0}
        if hasattr(self.made, "setup_state"):
            changed = awaited(self.made.setup_state(self.state))
            self.state = self.state if changed is None else changed
        return {"observation": None}

    def step(self, action: str) -> dict[str, Any]:
        self._add({"role": "assistant", "content": action})
        self.state["turn"] += 1
        if self._is_completed():
            return {"done": True}
        said = awaited(self.made.env_response(self.messages, self.state))
        if isinstance(said, tuple):
            said, self.state = said
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
        for message in said:
            self._add(message)
        return {"observation": said, "done": False}

    def finish(self) -> dict[str, Any]:
        """The sum of what the rubric's functions give, by their weights."""
        rubric = getattr(self.made, "rubric", None)
        functions = _either(rubric, "funcs", "reward_funcs")
        weights = _either(rubric, "weights", "reward_weights") or [1.0] * len(functions)
        offered = {**self.state, "state": self.state, "parser": getattr(rubric, "parser", None)}
        rewards = [weight * named(function, offered) for function, weight in zip(functions, weights, strict=True)]
        return {"reward": sum(rewards) if rewards else None}

    def _add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.state["completion"].append(message)

    def _is_completed(self) -> bool:
        ask = getattr(self.made, "is_completed", None)
        if ask is None:
            return False
        takes_messages = "messages" in inspect.signature(ask).parameters
        return bool(awaited(ask(self.messages, self.state) if takes_messages else ask(self.state)))


class Environment:
    """What a job's path names. like: a class or an object that shows which methods there are."""

    def __init__(self, like: Any, make: Callable[..., Any], *, is_function: bool) -> None:
        """make: the function itself, or what gives a rollout's object."""
        self.like, self.make = like, make
        self.is_stateful = not is_function
        self.has_turns = hasattr(like, "env_response")
        self.has_tools_alone = self.is_stateful and not self.has_turns and not hasattr(like, "step")

    def tools(self, where: str) -> dict[str, Tool]:
        """Methods that the policy calls, of an object that has nothing else."""
        if not self.has_tools_alone:
            return {}
        if not hasattr(self.like, "reset"):
            raise TypeError("it has none of reset, step and env_response")
        made = self.make()
        names = [name for name, _ in inspect.getmembers(made, inspect.ismethod)]
        file = where.rpartition(":")[0]
        named = [name for name in names if name not in OURS and not name.startswith("_")]
        return {name: Tool(getattr(made, name), f"{file}:{name}") for name in named}

    def play(self, messages: list[dict[str, Any]], answer: str) -> Any:
        return awaited(self.make(messages, answer))

    def begin(self) -> Session | Turns:
        made = self.make()
        return Turns(made) if self.has_turns else Session(made)


def load_environment(named: Callable[..., Any]) -> Environment:
    """What a function or a class is. Raises: TypeError where it is nothing that is known."""
    if inspect.isclass(named):
        return Environment(named, named, is_function=False)
    parameters = inspect.signature(named).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind not in (2, 4)]
    if needed:
        return Environment(None, named, is_function=True)
    made = named()
    is_shared = hasattr(made, "env_response")
    return Environment(made, (lambda: made) if is_shared else named, is_function=False)


def as_answer(said: Any) -> Any:
    """What `step` gave as a dictionary: of a Gymnasium tuple its observation, reward and whether it is the end."""
    if isinstance(said, tuple) and len(said) in (4, 5):
        observation, reward, *ends, _ = said
        return {"observation": observation, "reward": reward, "done": any(bool(end) for end in ends)}
    if isinstance(said, dict) and "done" not in said:
        return {**said, "done": said.get("observation") is None}
    return said


def _either(holder: Any, *names: str) -> list[Any]:
    found = [getattr(holder, name) for name in names if isinstance(getattr(holder, name, None), list)]
    return found[0] if found else []
