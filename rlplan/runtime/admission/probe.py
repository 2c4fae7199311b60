"""The probe: a small model of an architecture goes from trainer to engine and back, in a process of its own.

In: a folder with the small config. Out: one line of JSON: what differs, or how far log-probs are apart. Proved: the
trainer's weights are those that are planned with, vLLM's loader takes all of them, from files and from the trainer,
both sides give the same log-probs of the same tokens in fp32, and every weight has a gradient. Left out: 16-bit
formats, several ranks, LoRA.

The engine starts from other weights than it is then sent, so that a tensor which its loader leaves out is seen.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlplan.spec.model import read_model

PROMPT_LENS = (5, 24, 31)
"""Shorter and longer than the small model's attention window, in one row for the trainer. A model with fewer positions
than the longest prompt and its response gets shorter prompts."""

NUM_TOKENS, MAX_TOKENS, VOCABULARY = 12, 128, 256
SPREAD = 0.08
"""Every weight is moved by random numbers of this size: log-probs then depend on all of them."""

SAYS = "probe says: "

MAX_REASON = 300
"""Characters of a library's error that a message repeats."""


class _DifferenceError(Exception):
    """What differs, in words."""


def prove(folder: Path) -> dict[str, Any]:
    """{"mean", "max"} of |log-prob of the trainer - of the engine|, or {"differs": text}."""
    try:
        with _stage("transformers does not build it"):
            _draw(folder, folder / "start", seed=1)
            model = _draw(folder, folder / "sent", seed=2)
            _check_names(model, folder)
        with _stage("vLLM does not serve it"):
            llm = _start_engine(folder / "start")
        with _stage("vLLM does not load the trainer's weights"):
            _sync_weights(model, llm)
        with _stage("vLLM does not generate with it"):
            samples = _generate(llm, _longest(folder) - NUM_TOKENS)
        with _stage("the trainer has no log-probs of it"):
            return _compare(model, samples)
    except _DifferenceError as error:
        return {"differs": str(error)}


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Name what a block was about where it fails, whatever the libraries raise."""
    try:
        yield
    except _DifferenceError:
        raise
    except Exception as error:  # of any library
        said = " ".join(str(error).split())  # the first line of a pydantic error only counts its errors
        raise _DifferenceError(f"{what}: {type(error).__name__}: {said[:MAX_REASON]}") from error


def _draw(folder: Path, out: Path, seed: int) -> Any:
    """Write a small model with random weights, and load it as a trainer does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlplan.runtime.models.start_checkpoint import load_language_model, save_policy
    from rlplan.runtime.weight_sync.source import WeightSource, kept_buffers

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
        for _, buffer in kept_buffers(model):  # the same in every model: the engine has them from its files alone
            buffer.copy_(torch.linspace(-SPREAD, SPREAD, buffer.numel()).view_as(buffer))
    save_policy(model.config, WeightSource(model), out, folder)
    return load_language_model(str(out))


def _check_names(model: Any, folder: Path) -> None:
    """The trainer's weights against those that the plan counts and the packets name."""
    planned = {parameter.name: parameter.shape for parameter in read_model(folder).parameters}
    held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    odd = [name for name in {**planned, **held} if planned.get(name) != held.get(name)]
    if odd:
        name = odd[0]
        raise _DifferenceError(
            f"{len(odd)} weights are not those of the plan: {name} is {held.get(name)}, planned {planned.get(name)}"
        )


def _start_engine(folder: Path) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from rlplan.emit.vllm import WEIGHT_TRANSFER_BACKEND, WORKER_EXTENSION
    from rlplan.runtime.workers.engine.cpu_attention import choose_cpu_arguments
    from rlplan.runtime.workers.engine.cpu_kernels import register_cpu_kernels

    register_cpu_kernels()
    max_len = _longest(folder)
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


def _longest(folder: Path) -> int:
    """Tokens of the longest sequence: the model may have fewer positions."""
    return min(MAX_TOKENS, read_model(folder).max_position_embeddings)


def _sync_weights(model: Any, llm: Any) -> None:
    """Weights reach the engine as in a run, but for the channel."""
    from rlplan.runtime.weight_sync.channel import Update
    from rlplan.runtime.weight_sync.vllm_extension import UpdateInfo

    transfer = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine
    transfer.receiver = _Direct(model)
    transfer.start_weight_update()
    transfer.receive_weights(UpdateInfo(Update(serial=1, version=1, is_full=True, timeout_s=60.0)))
    transfer.finish_weight_update()


class _Direct:
    """In place of a PolicyReceiver: the weights themselves."""

    def __init__(self, model: Any) -> None:
        from rlplan.runtime.weight_sync.channel import ReceiveReport

        self.model, self.report = model, ReceiveReport()

    def tensors(self, *_: Any) -> Iterator[tuple[str, Any]]:
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def close(self) -> None:
        """Nothing was opened."""


def _generate(llm: Any, max_prompt_len: int) -> list[tuple[tuple[int, ...], list[int], list[float]]]:
    """(prompt, response, its log-probs), of each prompt."""
    from vllm import SamplingParams

    prompts = [
        tuple(3 + (7 * n + 5 * i) % (VOCABULARY - 6) for i in range(min(n, max_prompt_len))) for n in PROMPT_LENS
    ]
    drawn = SamplingParams(seed=3, logprobs=0, detokenize=False, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], drawn, use_tqdm=False)
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
        module.do_not_compile = True  # some families vLLM serves by transformers' own classes, whose calls it replaces
    pairs = [SequencePair(prompt, tuple(tokens)) for prompt, tokens, _ in samples]
    ours, _ = LogprobModel(model, 1.0, entropies="none")(make_batch(pairs))
    ours.sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    if without:
        raise _DifferenceError(f"{len(without)} weights have no gradient: {without[0]}")
    theirs = [logprob for _, _, logprobs in samples for logprob in logprobs]
    apart = [abs(a - b) for a, b in zip(ours.tolist(), theirs, strict=True)]
    return {"mean": sum(apart) / len(apart), "max": max(apart)}


if __name__ == "__main__":
    print(SAYS + json.dumps(prove(Path(sys.argv[1]))))
