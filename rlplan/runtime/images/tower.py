"""The frozen vision tower of a vision-language policy: it turns images into embeddings for the trained decoder.

The tower is not a submodule of the decoder, so code that counts, saves or sends the decoder's weights does not see it.

In: the whole model's folder, a batch with images. Out: the decoder's inputs: embeddings of text and images, and
positions on three axes (M-RoPE). Left out: videos, and training the tower (as with verl's `freeze_vision_tower=True`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlplan.runtime.models.start_checkpoint import list_weight_files
from rlplan.runtime.rollout.experience import PromptImage

_KEY = "rlplan_image_tower"
_TENSORS = ("model.visual.", "visual.")


class ImageTower:
    """See the module docstring."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoImageProcessor
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        self.module = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision_config, dtype=dtype)
        self.module.load_state_dict(_read_tower_tensors(folder))
        self.module.eval().requires_grad_(False)
        self.processor = AutoImageProcessor.from_pretrained(str(folder), trust_remote_code=False)
        self.rotary = qwen.Qwen2_5_VLRotaryEmbedding(config.text_config)
        self.num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in self.module.state_dict().values())

    @torch.no_grad()
    def compute_features(self, image: PromptImage) -> torch.Tensor:
        """Embeddings of an image, one per token, [tokens, hidden]."""
        values = self.processor(images=[make_pillow_image(image)], do_resize=False, return_tensors="pt")
        output = self.module(values["pixel_values"].to(self.module.dtype), grid_thw=values["image_grid_thw"])
        features: torch.Tensor = output.pooler_output
        return features


def make_pillow_image(image: PromptImage) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (image.columns * image.side, image.rows * image.side), image.pixels)


def attach_tower(language_model: Any, folder: Path) -> None:
    """Let a decoder accept images, with the vision tower of the whole model in a folder."""
    tower = ImageTower(folder, next(language_model.parameters()).dtype)
    # On text, whose three axes are equal, M-RoPE gives the same result as the decoder's own rotary embedding.
    language_model.model.rotary_emb = tower.rotary
    language_model.__dict__[_KEY] = tower


def get_tower(language_model: Any) -> ImageTower | None:
    """The tower attached to a decoder, or None."""
    tower: ImageTower | None = language_model.__dict__.get(_KEY)
    return tower


def embed_with_images(
    language_model: Any, tokens: torch.Tensor, images: Sequence[tuple[int, PromptImage]]
) -> torch.Tensor:
    """The decoder's input embeddings, [1, T, hidden]. images: (index of the image's first token in T, image)."""
    tower = get_tower(language_model)
    assert tower is not None, "a job with images gives its models a tower"
    embedded: torch.Tensor = language_model.model.embed_tokens(tokens)
    places = [index for first, image in images for index in range(first, first + image.num_tokens)]
    features = torch.cat([tower.compute_features(image) for _, image in images])
    return embedded.index_copy(1, torch.tensor(places), features.to(embedded.dtype).unsqueeze(0))


def compute_positions(num_tokens: int, images: Sequence[PromptImage]) -> list[list[int]]:
    """Positions of a sequence's tokens in time, height and width, [3, num_tokens]; they are equal for text.

    An image has one time index, and the text after it continues after the image's longer side.

    >>> compute_positions(6, [PromptImage(first=1, rows=1, columns=3, side=28, pixels=b"")])
    [[0, 1, 1, 1, 4, 5], [0, 1, 1, 1, 4, 5], [0, 1, 2, 3, 4, 5]]
    """
    axes: list[list[int]] = [[], [], []]
    here = 0
    for image in images:
        text = range(here, here + image.first - len(axes[0]))
        here += len(text)
        grid = [(0, row, column) for row in range(image.rows) for column in range(image.columns)]
        for axis, numbers in enumerate(axes):
            numbers += [*text, *(here + place[axis] for place in grid)]
        here += max(image.rows, image.columns)
    for numbers in axes:
        numbers += range(here, here + num_tokens - len(numbers))
    return axes


def _read_tower_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors = dict[str, torch.Tensor]()
    for path in list_weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dictionary
                start = next((start for start in _TENSORS if name.startswith(start)), None)
                if start:
                    tensors[name.removeprefix(start)] = file.get_tensor(name)
    return tensors
