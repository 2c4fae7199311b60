"""Environment protocols: adapters that give each supported kind of environment the methods reset, step and finish.

Supported are:

- a stateless function `(messages, answer)` that gets all turns each time;
- a class with `reset` and `step` (Gymnasium's tuples are accepted);
- a class with `reset` and methods that the policy calls as tools, optionally `get_reward` (TRL's
  `environment_factory`);
- an object with `env_response`, and optionally `setup_state`, `is_completed` and `rubric` (verifiers' `MultiTurnEnv`).

A function without required arguments creates such an object (verifiers' `load_environment`). Methods may be async.

In: the function or class that a job names. Out: an Environment. Left out: checks of answers (pool.py).
"""

import inspect
from collections.abc import Callable
from typing import Any

from rlplan.runtime.environments.tools import Tool
from rlplan.runtime.processes.awaiting import run_awaitable
from rlplan.runtime.rewards.child import list_accepted_names, select_arguments

CALLED_METHODS = ("reset", "step", "close", "get_reward")
"""Methods of an environment that rlplan calls; the policy calls the others as tools."""


def call_by_name(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    """Call a function with the offered arguments that it accepts, by name."""
    return run_awaitable(function(**select_arguments(list_accepted_names(function), offered)))


class Session:
    """One rollout's environment: an object with `reset`."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def tool(self, name: str) -> Tool:
        return Tool(getattr(self.environment, name), name)

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        """Start a rollout. row: the prompt's columns, with `prompt` and `answer`."""
        observation = call_by_name(self.environment.reset, row)
        return {"observation": observation[0] if isinstance(observation, tuple) else observation}

    def step(self, action: str) -> Any:
        return parse_answer(run_awaitable(self.environment.step(action)))

    def finish(self) -> dict[str, Any]:
        reward = run_awaitable(self.environment.get_reward()) if hasattr(self.environment, "get_reward") else None
        if hasattr(self.environment, "close"):
            run_awaitable(self.environment.close())
        return {"reward": reward}


class VerifiersSession:
    """One rollout of a verifiers environment, which keeps its state in a dictionary."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.messages: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}

    def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        self.messages = list(row["prompt"])
        row_fields = {"prompt": list(row["prompt"]), "answer": row["answer"], "info": row.get("info", {})}
        self.state = {**row_fields, "task": row.get("task", ""), "completion": [], "responses": [], "turn": 0}
        if hasattr(self.environment, "setup_state"):
            changed = run_awaitable(self.environment.setup_state(self.state))
            self.state = self.state if changed is None else changed
        return {"observation": None}

    def step(self, action: str) -> dict[str, Any]:
        self._add({"role": "assistant", "content": action})
        self.state["turn"] += 1
        if self._is_completed():
            return {"done": True}
        response = run_awaitable(self.environment.env_response(self.messages, self.state))
        if isinstance(response, tuple):
            response, self.state = response
        response = [{"role": "user", "content": response}] if isinstance(response, str) else response
        for message in response:
            self._add(message)
        return {"observation": response, "done": False}

    def finish(self) -> dict[str, Any]:
        """The weighted sum of the rubric's reward functions."""
        rubric = getattr(self.environment, "rubric", None)
        functions = _get_list(rubric, "funcs", "reward_funcs")
        weights = _get_list(rubric, "weights", "reward_weights") or [1.0] * len(functions)
        offered = {**self.state, "state": self.state, "parser": getattr(rubric, "parser", None)}
        rewards = [
            weight * call_by_name(function, offered) for function, weight in zip(functions, weights, strict=True)
        ]
        return {"reward": sum(rewards) if rewards else None}

    def _add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.state["completion"].append(message)

    def _is_completed(self) -> bool:
        ask = getattr(self.environment, "is_completed", None)
        if ask is None:
            return False
        takes_messages = "messages" in inspect.signature(ask).parameters
        return bool(run_awaitable(ask(self.messages, self.state) if takes_messages else ask(self.state)))


class Environment:
    """The environment that a job's path names. like: a class or object whose methods show its kind."""

    def __init__(self, like: Any, make: Callable[..., Any], *, is_function: bool) -> None:
        """make: the stateless function, or a factory of a rollout's object."""
        self.like, self.make = like, make
        self.is_stateful = not is_function
        self.has_turns = hasattr(like, "env_response")
        self.has_tools_alone = self.is_stateful and not self.has_turns and not hasattr(like, "step")

    def tools(self, where: str) -> dict[str, Tool]:
        """Methods that the policy calls, if the environment has only such methods."""
        if not self.has_tools_alone:
            return {}
        if not hasattr(self.like, "reset"):
            raise TypeError("it has no reset, step or env_response")
        example = self.make()
        names = [name for name, _ in inspect.getmembers(example, inspect.ismethod)]
        file = where.rpartition(":")[0]
        named = [name for name in names if name not in CALLED_METHODS and not name.startswith("_")]
        return {name: Tool(getattr(example, name), f"{file}:{name}") for name in named}

    def play(self, messages: list[dict[str, Any]], answer: str) -> Any:
        return run_awaitable(self.make(messages, answer))

    def begin(self) -> Session | VerifiersSession:
        environment = self.make()
        return VerifiersSession(environment) if self.has_turns else Session(environment)


def load_environment(factory: Callable[..., Any]) -> Environment:
    """The environment behind a function or class. Raises: TypeError for an unsupported one."""
    if inspect.isclass(factory):
        return Environment(factory, factory, is_function=False)
    parameters = inspect.signature(factory).parameters.values()
    # kinds 2 and 4 are *args and **kwargs, which need no argument
    needed = [
        parameter for parameter in parameters if parameter.default is parameter.empty and parameter.kind not in (2, 4)
    ]
    if needed:
        return Environment(None, factory, is_function=True)
    environment = factory()
    # A verifiers environment keeps a rollout's state in a dictionary, so one object serves all rollouts.
    is_shared = hasattr(environment, "env_response")
    return Environment(environment, (lambda: environment) if is_shared else factory, is_function=False)


def parse_answer(result: Any) -> Any:
    """The result of `step` as a dictionary; a Gymnasium tuple becomes observation, reward and done."""
    # Gym returned one end, `done`; Gymnasium returns two, `terminated` and `truncated`
    if isinstance(result, tuple) and len(result) in (4, 5):
        observation, reward, *ends, _ = result
        return {"observation": observation, "reward": reward, "done": any(bool(end) for end in ends)}
    if isinstance(result, dict) and "done" not in result:
        return {**result, "done": result.get("observation") is None}
    return result


def _get_list(holder: Any, *names: str) -> list[Any]:
    lists = [getattr(holder, name) for name in names if isinstance(getattr(holder, name, None), list)]
    return lists[0] if lists else []
