"""The probe: tests a small model of an architecture with trainer and engine, in a separate process.

In: a folder with the small config. Out: one line of JSON: an error, or the difference of log-probs. It proves four
things. The trainer has exactly the planned weights. vLLM loads all of them, from files and from the trainer. Both sides
compute the same log-probs in fp32. Every weight has a gradient. Left out: 16-bit formats, several ranks, LoRA.

The engine starts from other weights than the trainer's, so that a weight which its loader ignores is detected.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlplan.spec.model import read_model

PROMPT_LENS = (5, 24, 31)
"""Prompt lengths, shorter and longer than the small model's attention window, packed into one row for the trainer.
Models with fewer positions get shorter prompts."""

NUM_TOKENS, MAX_TOKENS, VOCABULARY = 12, 128, 256
SPREAD = 0.08
"""Standard deviation of the random numbers added to every weight, so that log-probs depend on all of them."""

SAYS = "probe says: "
"""Prefix of the line of output that holds the result."""

MAX_REASON = 300
"""Maximum length of a library's error text in a message."""


class _DifferenceError(Exception):
    """The probe has failed; the text states what differs."""


def prove(folder: Path) -> dict[str, Any]:
    """Run the probe. Returns: {"mean", "max"} of |trainer's log-prob - engine's|, or {"differs": text}."""
    try:
        with _stage("transformers does not build it"):
            _create_model(folder, folder / "start", seed=1)
            model = _create_model(folder, folder / "sent", seed=2)
            _check_names(model, folder)
        with _stage("vLLM does not serve it"):
            llm = _start_engine(folder / "start")
        with _stage("vLLM does not load the trainer's weights"):
            _sync_weights(model, llm)
        with _stage("vLLM does not generate with it"):
            samples = _generate(llm, _max_sequence_len(folder) - NUM_TOKENS)
        with _stage("the trainer has no log-probs of it"):
            return _compare(model, samples)
    except _DifferenceError as error:
        return {"differs": str(error)}


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Context that turns any error into a _DifferenceError with the stage's name."""
    try:
        yield
    except _DifferenceError:
        raise
    except Exception as error:  # libraries raise all kinds of errors
        reason = " ".join(str(error).split())  # all lines: the first line of a pydantic error only counts its errors
        raise _DifferenceError(f"{what}: {type(error).__name__}: {reason[:MAX_REASON]}") from error


def _create_model(folder: Path, out: Path, seed: int) -> Any:
    """Write a small model with random weights, and load it as a trainer does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlplan.runtime.models.start_checkpoint import load_language_model, save_policy
    from rlplan.runtime.weight_sync.source import WeightSource, persistent_buffers

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
        for _, buffer in persistent_buffers(model):  # equal in both models, because weight sync does not send buffers
            buffer.copy_(torch.linspace(-SPREAD, SPREAD, buffer.numel()).view_as(buffer))
    save_policy(model.config, WeightSource(model), out, folder)
    return load_language_model(str(out))


def _check_names(model: Any, folder: Path) -> None:
    """Compare the trainer's weights with those that the planner counts and weight sync names."""
    planned = {parameter.name: parameter.shape for parameter in read_model(folder).parameters}
    actual = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    different = [name for name in {**planned, **actual} if planned.get(name) != actual.get(name)]
    if different:
        name = different[0]
        raise _DifferenceError(
            f"{len(different)} weights differ from the plan: {name} has shape {actual.get(name)}, planned "
            f"{planned.get(name)}"
        )


def _start_engine(folder: Path) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from rlplan.emit.vllm import WEIGHT_TRANSFER_BACKEND, WORKER_EXTENSION
    from rlplan.runtime.workers.engine.vllm_on_cpu import choose_cpu_arguments, register_cpu_kernels

    register_cpu_kernels()
    max_len = _max_sequence_len(folder)
    return LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        load_format="safetensors",
        max_model_len=max_len,
        max_num_seqs=len(PROMPT_LENS),
        max_num_batched_tokens=max_len,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=True,
        enable_chunked_prefill=False,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        worker_extension_cls=WORKER_EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND),
        **choose_cpu_arguments(read_model(folder)),
    )


def _max_sequence_len(folder: Path) -> int:
    """Length of the longest sequence in tokens; limited by the model's positions."""
    return min(MAX_TOKENS, read_model(folder).max_position_embeddings)


def _sync_weights(model: Any, llm: Any) -> None:
    """Load the trainer's weights into the engine as in a run, but without a channel."""
    from rlplan.runtime.weight_sync.channel import Update
    from rlplan.runtime.weight_sync.vllm_extension import UpdateInfo

    transfer = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine
    transfer.receiver = _Direct(model)
    transfer.start_weight_update()
    transfer.receive_weights(UpdateInfo(Update(serial=1, version=1, is_full=True, timeout_s=60.0)))
    transfer.finish_weight_update()


class _Direct:
    """A replacement of PolicyReceiver that yields the trainer's weights directly."""

    def __init__(self, model: Any) -> None:
        from rlplan.runtime.weight_sync.channel import ReceiveReport

        self.model, self.report = model, ReceiveReport()

    def tensors(self, *_: Any) -> Iterator[tuple[str, Any]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def close(self) -> None:
        """Do nothing: there is no channel."""


def _generate(llm: Any, max_prompt_len: int) -> list[tuple[tuple[int, ...], list[int], list[float]]]:
    """Generate one response per prompt; return (prompt, response, log-probs) of each."""
    from vllm import SamplingParams

    prompts = [
        tuple(3 + (7 * n + 5 * i) % (VOCABULARY - 6) for i in range(min(n, max_prompt_len))) for n in PROMPT_LENS
    ]
    parameters = SamplingParams(seed=3, logprobs=0, detokenize=False, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)
    samples = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, output.outputs[0].logprobs, strict=True)]
        samples.append((prompt, tokens, logprobs))
    return samples


def _compare(model: Any, samples: list[tuple[tuple[int, ...], list[int], list[float]]]) -> dict[str, Any]:
    from rlplan.runtime.models.logprob_model import LogprobModel, make_batch
    from rlplan.runtime.rollout.experience import SequencePair

    for module in model.modules():
        # For some families vLLM uses transformers' own classes and patches their calls; without this flag the patched
        # call would compile the trainer's modules.
        module.do_not_compile = True
    pairs = [SequencePair(prompt, tuple(tokens)) for prompt, tokens, _ in samples]
    ours, _ = LogprobModel(model, 1.0, entropies="none")(make_batch(pairs))
    ours.sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if without:
        raise _DifferenceError(f"{len(without)} weights have no gradient: {without[0]}")
    theirs = [logprob for _, _, logprobs in samples for logprob in logprobs]
    differences = [abs(a - b) for a, b in zip(ours.tolist(), theirs, strict=True)]
    return {"mean": sum(differences) / len(differences), "max": max(differences)}


if __name__ == "__main__":
    print(SAYS + json.dumps(prove(Path(sys.argv[1]))))
