"""Image tokens in prompts: each image gets as many tokens as the policy's own processor gives it.

In: a prompt's tokens with one token per image, and the row's image cells. Out: tokens, and images with their positions.
Left out: reading rows (in_rows.py), decoding (decoding.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlplan.runtime.data.layouts import BadRowError
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.images.in_rows import MARK, insert_marks, read_image
from rlplan.runtime.rollout.experience import PromptImage
from rlplan.spec.models.config import read_config
from rlplan.spec.models.families.image_sizes import read_image_rule
from rlplan.spec.resolved import ResolvedJob

_AROUND = ("vision_start_token_id", "image_token_id", "vision_end_token_id")


class ImagePlaces:
    """See the module docstring. It serves one policy, with the image limits of its job."""

    def __init__(self, job: ResolvedJob, tokenizer: ModelText) -> None:
        folder, data = Path(job.policy.path), job.needed_data
        config = read_config(folder / "config.json")
        self.rule, self.tokenizer = read_image_rule(folder, data.max_image_pixels), tokenizer
        self.token = int(config["image_token_id"])
        self.around = "".join(tokenizer.special(int(config[key])) for key in _AROUND)

    def write_image_tokens(self, text: str, num_images: int) -> str:
        """A plain text in which each image mark is replaced by the image token and its start and end tokens."""
        return insert_marks(text, num_images).replace(MARK, self.around) if num_images else text

    def expand_images(
        self, tokens: Sequence[int], cells: Sequence[Any], folder: Path
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Repeat each image token as often as its image needs. Raises: BadRowError."""
        places = [index for index, token in enumerate(tokens) if token == self.token]
        if len(places) != len(cells):
            raise BadRowError(f"the prompt has {len(places)} image tokens, but its row has {len(cells)} images")
        expanded: list[int] = []
        images: list[PromptImage] = []
        end = 0  # tokens up to here are in `expanded`
        for place, cell in zip(places, cells, strict=True):
            expanded += tokens[end:place]
            rows, columns, pixels = self.tokenizer.image(read_image(cell, folder), self.rule)
            images.append(PromptImage(len(expanded), rows, columns, self.rule.side, pixels))
            expanded += [self.token] * images[-1].num_tokens
            end = place + 1
        return (*expanded, *tokens[end:]), tuple(images)
