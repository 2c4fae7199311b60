"""Images of a row: the files in its image column, and the position of each image in the prompt.

A path must be relative to the data's folder and stay inside it. Each image gets as many tokens as the policy's own
processor gives it.

In: cells, the folder of the data, prompts. Out: bytes of files; prompts with a mark for every image; tokens, and images
with their positions. Left out: network addresses, and decoding (decoding.py).
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplan.errors import RlplanError
from rlplan.reading import read_bytes
from rlplan.runtime.data.layouts import BadRowError
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.images.decoding import MAX_FILE_BYTES
from rlplan.runtime.rollout.experience import PromptImage
from rlplan.spec.models.config import read_config
from rlplan.spec.models.families.image_sizes import read_image_rule
from rlplan.spec.resolved import ResolvedJob

MARK = "<image>"
"""Mark of an image in a text, as in verl's data; without marks, images come before the text."""
_AROUND = ("vision_start_token_id", "image_token_id", "vision_end_token_id")


def read_image(cell: Any, folder: Path) -> bytes:
    """Bytes of an image file, given as a path, a data URI, or Hugging Face's {bytes, path}. Raises: BadRowError."""
    if isinstance(cell, Mapping):
        packed = cell.get("bytes")  # base64 already: tables.py reads rows through JSON, which lacks bytes
        cell = f"data:image/any;base64,{packed}" if packed else cell.get("path")
    if not isinstance(cell, str) or not cell:
        raise BadRowError(f"an image is {type(cell).__name__}, not a path, a data URI or an object with bytes or path")
    if cell.startswith("data:"):
        head, _, packed = cell.partition(",")
        if not head.endswith(";base64") or len(packed) > 2 * MAX_FILE_BYTES:
            raise BadRowError(f"an image's data URI must be base64 of at most {MAX_FILE_BYTES} bytes")
        try:
            return base64.b64decode(packed, validate=True)
        except (binascii.Error, ValueError):
            raise BadRowError("an image's data URI is not valid base64") from None
    path = Path(cell)
    if "://" in cell or "\0" in cell or path.is_absolute() or ".." in path.parts:
        raise BadRowError(f"the image {cell} is not a path below the data's folder")
    try:
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise BadRowError(f"the image {cell} leads out of the data's folder")
        return read_bytes(folder / path, "an image", limit=MAX_FILE_BYTES)
    except RlplanError as error:
        raise BadRowError(f"the image {cell}: {error.what}") from None


def insert_marks(text: str, num_images: int) -> str:
    """A text with a mark for every image. Raises: BadRowError when the number of marks differs.

    >>> insert_marks("which color?", 2)
    '<image><image>which color?'
    """
    count = text.count(MARK)
    if count not in (0, num_images):
        raise BadRowError(f"{count} {MARK} marks in the prompt, and {num_images} images in its row")
    return text if count else MARK * num_images + text


def split_into_parts(chat: Sequence[Mapping[str, str]], num_images: int) -> list[dict[str, Any]]:
    """Messages with lists of parts as contents, in the format of vision-language templates. Raises: BadRowError.

    >>> split_into_parts([{"role": "user", "content": "this <image>?"}], 1)[0]["content"]
    [{'type': 'text', 'text': 'this '}, {'type': 'image'}, {'type': 'text', 'text': '?'}]
    """
    first = next((index for index, message in enumerate(chat) if message["role"] == "user"), 0)
    has_marks = any(MARK in message["content"] for message in chat)
    texts = [
        insert_marks(message["content"], num_images) if index == first and not has_marks else message["content"]
        for index, message in enumerate(chat)
    ]
    if (count := sum(text.count(MARK) for text in texts)) != num_images:
        raise BadRowError(f"{count} {MARK} marks in the prompt, and {num_images} images in its row")
    return [{**message, "content": _split_text(text)} for message, text in zip(chat, texts, strict=True)]


def _split_text(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for index, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] * bool(index)
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


class ImagePlaces:
    """Image tokens in prompts of one policy, with the image limits of its job."""

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
