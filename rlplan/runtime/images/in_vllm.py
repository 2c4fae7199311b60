"""Images in vLLM: prompts with images, and a Qwen2.5-VL class whose image processor needs no torchvision.

vLLM 0.32 imports one function from a transformers module that needs torchvision, which a CPU install omits
(requirements/README.md). transformers has the same function in its Pillow-based module, which is registered instead.
vLLM's processor also needs a video processor, and transformers has none without torchvision, so the class here supports
images only. Pixels already have the processor's size (images/decoding.py).

In: prompts and their images. Out: vLLM's prompts, and a registered model class. Left out: videos.
"""

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlplan.runtime.images.tower import make_pillow_image
from rlplan.runtime.rollout.experience import RolloutRequest

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
_THEIRS, _WITH_PILLOW = (f"transformers.models.qwen2_vl.image_processing_{name}qwen2_vl" for name in ("", "pil_"))


def make_engine_prompt(request: RolloutRequest) -> dict[str, Any]:
    """A prompt in vLLM's format, with one token per image, which vLLM repeats as often as the image needs."""
    tokens = list(request.prompt)
    if not request.images:
        return {"prompt_token_ids": tokens}
    for image in reversed(request.images):  # from the end, so that earlier indices stay valid
        del tokens[image.first + 1 : image.first + image.num_tokens]
    images = [make_pillow_image(image) for image in request.images]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}


@cache
def register_image_model() -> None:
    """Make vLLM load this module's class for the architecture. Runs once per process."""
    sys.modules.setdefault(_THEIRS, importlib.import_module(_WITH_PILLOW))
    from transformers import AutoImageProcessor, BatchFeature
    from vllm.model_executor.models import qwen2_5_vl
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import PromptReplacement
    from vllm.multimodal.processing.inputs import ProcessorInputs

    class Information(qwen2_5_vl.Qwen2_5_VLProcessingInfo):
        def get_image_processor(self, **_: Any) -> Any:
            return _load_processor(AutoImageProcessor, self.ctx.model_config.model)

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None}

        def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
            return {"text_kwargs": set(), "images_kwargs": set()}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
            """Most tokens per image: no image has more than the longest prompt."""
            return {"image": min(seq_len, self.get_max_image_tokens())}

    class Processor(qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
        requires_tokenizer = False

        def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
            """Dummy inputs of the smallest image size: vLLM does not profile, because the KV-cache size is given."""
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

            def repeat_token(index: int) -> list[int]:
                return [token] * (int(out_mm_kwargs["image"][index]["image_grid_thw"].data.prod()) // merged)

            return [PromptReplacement(modality="image", target=[token], replacement=repeat_token)]

    register = MULTIMODAL_REGISTRY.register_processor(
        Processor, info=Information, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder
    )
    ModelRegistry.register_model(ARCHITECTURE, register(type(ARCHITECTURE, (qwen2_5_vl.__dict__[ARCHITECTURE],), {})))


@cache
def _load_processor(kind: Any, folder: str) -> Any:
    return kind.from_pretrained(folder, trust_remote_code=False)
