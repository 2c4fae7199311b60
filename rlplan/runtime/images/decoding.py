"""Decoding: a file of an image as pixels of the size that the policy's processor gives it.

In: the bytes of a PNG, JPEG or WebP. Out: rows and columns of tokens, and pixels. The file is a stranger's: this is
called in the tokenizer's process alone (data/model_text.py), which has limits of memory and time, and the picture's
size is looked at before its pixels are unpacked. Left out: other formats, all but an animation's first picture.
"""

import base64
import io
from typing import Any

from rlplan.spec.models.families.image_sizes import ImageRule

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_FILE_BYTES = 1 << 24
MAX_DECODED_PIXELS = 1 << 26
"""Of a picture before it is made smaller: 256 MiB once it is unpacked."""


class BadImageError(ValueError):
    """An image that cannot be used; says why."""


def decode(data: bytes, rule: ImageRule) -> dict[str, Any]:
    """{rows, columns, pixels}, the pixels in base64. Raises: BadImageError."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_DECODED_PIXELS:
                raise BadImageError(f"an image of {width} x {height} pixels: at most {MAX_DECODED_PIXELS} are decoded")
            rows, columns = rule.grid(height, width)
            upright = ImageOps.exif_transpose(picture)
            rows, columns = rule.grid(upright.height, upright.width)
            pixels = upright.convert("RGB").resize((columns * rule.side, rows * rule.side), Image.Resampling.BICUBIC)
    except BadImageError:
        raise
    except Exception as error:  # of any of the library's decoders
        raise BadImageError(f"an image that cannot be read ({type(error).__name__}): {error}") from None
    return {"rows": rows, "columns": columns, "pixels": base64.b64encode(pixels.tobytes()).decode()}
