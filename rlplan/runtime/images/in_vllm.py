"""Images in requests: vLLM's Qwen2.5-VL with an image processor that needs no torchvision.

In: prompts and their images. Out: vLLM's prompts, and a model class registered with vLLM in place of its own.
vLLM 0.32's module takes one function from a module of transformers that imports torchvision, which a CPU install leaves
out (requirements/README.md); transformers has the same function beside its image processor on Pillow, so that module
stands in. Its processing class asks for a processor of videos too, which has no such form: here there are images alone.
Pixels have the processor's size already (images/decoding.py). Left out: videos.
"""

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlplan.runtime.images.tower import pillow_image
from rlplan.runtime.rollout.experience import RolloutRequest

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
_THEIRS, _WITH_PILLOW = (f"transformers.models.qwen2_vl.image_processing_{name}qwen2_vl" for name in ("", "pil_"))


def engine_prompt(request: RolloutRequest) -> dict[str, Any]:
    """vLLM's form of a prompt: of each image one token, for which vLLM puts as many as the image has."""
    tokens = list(request.prompt)
    if not request.images:
        return {"prompt_token_ids": tokens}
    for image in reversed(request.images):
        del tokens[image.first + 1 : image.first + image.num_tokens]
    images = [pillow_image(image) for image in request.images]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}


@cache
def register_image_model() -> None:
    """Make vLLM load the class of this module for the architecture. Once a process."""
    sys.modules.setdefault(_THEIRS, importlib.import_module(_WITH_PILLOW))
    from transformers import AutoImageProcessor, BatchFeature
    from vllm.model_executor.models import qwen2_5_vl
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import PromptReplacement
    from vllm.multimodal.processing.inputs import ProcessorInputs

    class Information(qwen2_5_vl.Qwen2_5_VLProcessingInfo):
        def get_image_processor(self, **_: Any) -> Any:
            return _processor(AutoImageProcessor, self.ctx.model_config.model)

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
            return {"text_kwargs": set(), "images_kwargs": set()}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
            """Of the longest prompt's size: larger images do not come."""
            return {"image": min(seq_len, self.get_max_image_tokens())}

    class Processor(qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
        requires_tokenizer = False

        def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
            """Of the smallest image: the KV cache's size is given, and nothing is profiled."""
            count, side = mm_counts.get("image", 0), 2 * self.info.get_image_processor().patch_size
            images = self.dummy_inputs._get_dummy_images(width=side, height=side, num_images=count, overrides=None)
            items = self.info.parse_mm_data({"image": images}, validate=False)
            return ProcessorInputs(prompt=[self.info.get_hf_config().image_token_id] * count, mm_data_items=items)

        def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]) -> Any:
            processor = self.info.get_image_processor()
            return BatchFeature(processor(images=hf_data["images"], do_resize=False, return_tensors="pt").data)

        def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
            config = self.info.get_hf_config()
            token, merged = config.image_token_id, config.vision_config.spatial_merge_size**2

            def tokens_of(index: int) -> list[int]:
                return [token] * (int(out_mm_kwargs["image"][index]["image_grid_thw"].data.prod()) // merged)

            return [PromptReplacement(modality="image", target=[token], replacement=tokens_of)]

    made = MULTIMODAL_REGISTRY.register_processor(
        Processor, info=Information, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder
    )
    ModelRegistry.register_model(ARCHITECTURE, made(type(ARCHITECTURE, (qwen2_5_vl.__dict__[ARCHITECTURE],), {})))


@cache
def _processor(kind: Any, folder: str) -> Any:
    return kind.from_pretrained(folder, trust_remote_code=False)
