"""Image sizes in a prompt: the pixels and tokens that a vision-language model's processor produces.

In: `config.json` and `preprocessor_config.json` as data, an image's size. Out: its size in tokens. Left out: videos,
and processors that split images. Source: transformers 5.19, `smart_resize` of image_processing_qwen2_vl.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplan.spec.base import read_json
from rlplan.spec.models.config import read_config

MAX_CONFIG_BYTES = 1 << 20
MAX_RATIO = 200
"""Largest ratio of an image's sides; the processor refuses others."""

WITH_IMAGES = ("Qwen2_5_VLForConditionalGeneration",)


@dataclass(frozen=True)
class ImageRule:
    """How a processor resizes images."""

    patch: int
    """Side of a vision tower's patch in pixels."""
    merge: int
    """Patches per token in each direction."""
    min_pixels: int
    max_pixels: int

    @property
    def side(self) -> int:
        """Side of one token in pixels."""
        return self.patch * self.merge

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return self.max_pixels // self.patch**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of tokens of an image. Raises: ValueError for an image that is too narrow.

        >>> ImageRule(14, 2, 56 * 56, 1280 * 28 * 28).grid(480, 640)
        (17, 23)
        """
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"one side is more than {MAX_RATIO} times the other")
        side = self.side
        rows, columns = round(height / side), round(width / side)
        # rounded down above the limit and up below it, as in smart_resize, so that the result lies within the limits
        if rows * columns * side**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
        elif rows * columns * side**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(length * scale / side) for length in (height, width))
        return max(1, rows), max(1, columns)


def takes_images(config: Mapping[str, Any]) -> bool:
    """Whether runs accept images in prompts for this model."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in WITH_IMAGES


def read_image_rule(folder: Path, max_pixels: int) -> ImageRule:
    """The resizing rule of a model's folder. Raises: SpecError where a file is missing or not a JSON object."""
    processor = read_json(folder / "preprocessor_config.json", "the image processor", limit=MAX_CONFIG_BYTES)
    return build_image_rule(read_config(folder / "config.json"), processor, max_pixels)


def build_image_rule(config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int) -> ImageRule:
    """The resizing rule of a model's configs. max_pixels: the job's limit, which may be lower than the processor's.

    >>> build_image_rule({"vision_config": {}}, {"max_pixels": 12845056}, 50176)
    ImageRule(patch=14, merge=2, min_pixels=3136, max_pixels=50176)
    """
    tower, size = config.get("vision_config") or {}, processor.get("size") or {}
    largest = int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    smallest = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    return ImageRule(
        patch=int(tower.get("patch_size", 14)),
        merge=int(tower.get("spatial_merge_size", 2)),
        min_pixels=min(smallest, max_pixels),
        max_pixels=min(largest, max_pixels),
    )
