"""The probe: a small model of an architecture passes from trainer to engine and back, in a process of its own.

In: a folder with the small config. Out: one line of JSON: what differs, or nothing. What is proved: the weights that
the trainer hands over have the names and shapes that the memory model lists and vLLM's loader takes, and both give the
same log-probs of the same tokens, in fp32. Left out: 16-bit formats, several ranks, LoRA.

The engine starts from other weights than it is then sent, so that a tensor that its loader leaves out is seen.
"""

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = tuple(tuple(3 + (7 * first + 5 * place) % 250 for place in range(length)) for first, length in enumerate((5, 24, 31)))
"""Longer and shorter than the small model's attention window, in one row for the trainer."""
NUM_TOKENS = 12
SPREAD = 0.08
"""Every weight is moved by random numbers of this size: log-probs then depend on all of them."""

SAYS = "probe says: "


def main(folder: Path) -> dict[str, Any]:
    from rlplan.runtime.models.start_checkpoint import load_language_model

    model = draw(folder, folder / "start", seed=1)
    llm = start_engine(folder / "start")
    del model
    draw(folder, folder / "sent", seed=2)
    model = load_language_model(str(folder / "sent"))
    problem = hand_over(model, llm)
    if problem:
        return {"differs": problem}
    return compare(model, llm)


def draw(folder: Path, out: Path, seed: int) -> Any:
    """Write a small model with random weights, and give it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlplan.runtime.models.start_checkpoint import save_policy

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    save_policy(model.config, model.named_parameters(), out, folder)
    return model


def start_engine(folder: Path) -> Any:
    import rlplan.runtime.weight_sync.vllm_extension  # noqa: F401
    from rlplan.emit.vllm import WEIGHT_TRANSFER_BACKEND, WORKER_EXTENSION
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        load_format="safetensors",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=1 << 26,
        block_size=32,
        enable_prefix_caching=True,
        enable_chunked_prefill=False,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=WORKER_EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND),
        distributed_executor_backend="uni",
    )


def hand_over(model: Any, llm: Any) -> str:
    from rlplan.runtime.weight_sync.channel import ReceiveReport
    from rlplan.spec.model import model_from_config

    listed = {p.name: p.shape for p in model_from_config(config_of(model), where="config.json").parameters}
    held = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    if listed != held:
        odd = sorted(set(listed.items()) ^ set(held.items()))
        return f"the trainer's weights are others than those that are planned: {odd[:4]}"

    class Handed:
        report = ReceiveReport()

        def tensors(self, update: Any) -> Any:
            return ((name, tensor.detach()) for name, tensor in model.named_parameters())

        def close(self) -> None:
            pass

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    transfer = worker.weight_transfer_engine
    transfer.receiver = Handed()

    class U:
        update = None

    transfer.start_weight_update()
    transfer.receive_weights(U())
    transfer.finish_weight_update()
    return ""


def config_of(model: Any) -> dict[str, Any]:
    return json.loads((Path(model.name_or_path) / "config.json").read_text())


def compare(model: Any, llm: Any) -> dict[str, Any]:
    import torch
    from rlplan.runtime.models.logprob_model import LogprobModel, make_batch
    from rlplan.runtime.rollout.experience import SequencePair
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=1.0, seed=3, logprobs=0, detokenize=False, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], parameters, use_tqdm=False)
    pairs, theirs = [], []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        said = output.outputs[0]
        pairs.append(SequencePair(prompt, tuple(said.token_ids)))
        theirs += [step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)]
    wrapped = LogprobModel(model, 1.0, entropies="none")
    ours, _ = wrapped(make_batch(pairs))
    with torch.no_grad():
        off = [abs(a - b) for a, b in zip(ours.tolist(), theirs, strict=True)]
    ours.sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    return {"mean": sum(off) / len(off), "max": max(off), "least": min(theirs), "no_grad": missing[:3]}


if __name__ == "__main__":
    print(SAYS + json.dumps(main(Path(sys.argv[1]))))
