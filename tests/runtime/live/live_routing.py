"""A live engine with a small Qwen3-MoE that records its routers' choices, and the trainer's model that replays them.

`main` writes as JSON what engine and trainer say of the same answers, in fp32 and bf16.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

NUM_EXPERTS, NUM_LAYERS, CHOSEN = 32, 6, 2
PROMPTS = ((5, 6, 7, 8, 9, 3), (9, 3, 4), (11, 5, 5, 12))
RESPONSE_LEN = 24


def build_mixture(folder: Path) -> None:
    """A random Qwen3-MoE with routers that are often undecided, so that rounding changes what they choose."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.factories import EXAMPLES

    shutil.copytree(EXAMPLES / "models" / "sorter", folder, dirs_exist_ok=True)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02 if name.endswith("gate.weight") else 0.3 if "experts" in name else 0.15)
    model.save_pretrained(folder)


def main(path: str) -> None:
    """Generate with the engine, score with the trainer's model with and without replay; once for each type."""
    from tests.runtime.live.live_forks import answer

    with tempfile.TemporaryDirectory() as folder:
        build_mixture(Path(folder))
        answer(Path(path), {dtype: compare(folder, dtype) for dtype in ("float32", "bfloat16")})


def compare(folder: str, dtype: str) -> dict[str, Any]:
    """Log-probs of all answers: the engine's, the trainer's own, and the trainer's with replayed experts."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlplan.emit.vllm import engine_arguments
    from rlplan.runtime.models.logprob_model import LogprobModel, make_batch
    from rlplan.runtime.rollout.experience import RolloutRequest, SequencePair
    from rlplan.runtime.workers.engine.rollout_engine import RolloutEngine
    from tests.factories import make_job

    job = make_job(
        **{
            "policy.path": folder,
            "rollout.dtype": dtype,
            "training.dtype": dtype,
            "rollout.replays_experts": True,
            "workload.ignores_eos": True,
            "workload.max_response_len": 40,
        }
    )
    engine = RolloutEngine("rollout_engine/0", job, engine_arguments(job), 1)
    engine.invoke("import_libraries")
    engine.invoke("start", folder)
    requests = [
        RolloutRequest(f"step-{index}", prompt, 2, 1.0, 7 + index, RESPONSE_LEN) for index, prompt in enumerate(PROMPTS)
    ]
    finished = engine.invoke("generate", requests)
    completions = [(r.prompt, c) for r, done in zip(requests, finished, strict=True) for c in done.completions]
    engine.invoke("stop")
    model = LogprobModel(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), 1.0, entropies="none")
    answers: dict[str, Any] = {"engine": [value for _, c in completions for value in c.logprobs]}
    for name in ("own", "replayed"):
        pairs = [
            SequencePair(prompt, c.tokens, experts=c.experts if name == "replayed" else None)
            for prompt, c in completions
        ]
        with torch.no_grad():
            answers[name] = model(make_batch(pairs))[0].tolist()
    answers["shapes"] = [list(c.experts.shape) for _, c in completions]
    answers["lengths"] = [len(prompt) + len(c.tokens) for prompt, c in completions]
    answers["same_choice"] = compare_choices(model, completions)
    return answers


def compare_choices(model: Any, completions: list[Any]) -> float:
    """Share of (token, layer) whose experts the trainer's own routers choose as the engine did."""
    import torch

    from rlplan.runtime.models.logprob_model import make_batch
    from rlplan.runtime.rollout.experience import SequencePair

    chosen: list[Any] = []
    gates = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [gate.register_forward_hook(lambda _, __, output: chosen.append(output[2])) for gate in gates]
    same = total = 0
    for prompt, completion in completions:
        chosen.clear()
        with torch.no_grad():
            model(make_batch([SequencePair(prompt, completion.tokens)]))
        own = torch.stack(chosen, 1)[: len(completion.experts)].sort(-1).values
        engine = torch.as_tensor(completion.experts).long().sort(-1).values
        same += int((own == engine).all(-1).sum())
        total += own.shape[0] * own.shape[1]
    for hook in hooks:
        hook.remove()
    return same / total
