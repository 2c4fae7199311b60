"""Kernels that vLLM must use on a CPU, by the policy's config."""

import json
from pathlib import Path

from rlplan.runtime.workers.engine.vllm_on_cpu import choose_cpu_arguments
from rlplan.spec.model import read_model
from tests.factories import EXAMPLES
from tests.runtime.runs.architectures import make_config


def test_with_latent_attention_torch_rotates_queries_on_a_cpu(tmp_path: Path) -> None:
    """vLLM 0.32's kernel for CPUs takes a view for whole memory: log-probs were 1.6 apart (DeepSeek-V2), now 4e-6."""
    (tmp_path / "config.json").write_text(json.dumps(make_config("DeepseekV2ForCausalLM")))
    arguments = choose_cpu_arguments(read_model(tmp_path))
    assert arguments["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}
    assert arguments["attention_backend"] == "CPU_MLA"
    assert choose_cpu_arguments(read_model(EXAMPLES / "models" / "sorter")) == {}
