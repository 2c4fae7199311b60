"""Decoding of image files to pixels of the size that the policy's processor expects.

The file is untrusted, so it is decoded only in the tokenizer's process (data/model_text.py), which has memory and time
limits. The image size is checked before pixels are decompressed.

In: the bytes of a PNG, JPEG or WebP. Out: rows and columns of tokens, and pixels. Left out: other formats; of an
animation only the first frame is used.
"""

import base64
import io
from typing import Any

from rlplan.spec.models.families.image_sizes import ImageRule

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_FILE_BYTES = 1 << 24
MAX_DECODED_PIXELS = 1 << 26
"""Most pixels of a file before it is resized; they take 256 MiB decompressed."""


class BadImageError(ValueError):
    """An image cannot be used; the message gives the reason."""


def decode(data: bytes, rule: ImageRule) -> dict[str, Any]:
    """Decode an image to {rows, columns, pixels}, with pixels in base64. Raises: BadImageError."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_DECODED_PIXELS:
                raise BadImageError(f"an image of {width} x {height} pixels; the limit is {MAX_DECODED_PIXELS} pixels")
            # raises for a size that the processor refuses, before the pixels are decompressed
            rows, columns = rule.grid(height, width)
            upright = ImageOps.exif_transpose(picture)
            rows, columns = rule.grid(upright.height, upright.width)
            pixels = upright.convert("RGB").resize((columns * rule.side, rows * rule.side), Image.Resampling.BICUBIC)
    except BadImageError:
        raise
    except Exception as error:  # the library's decoders raise many types
        raise BadImageError(f"an image that cannot be read ({type(error).__name__}): {error}") from None
    return {"rows": rows, "columns": columns, "pixels": base64.b64encode(pixels.tobytes()).decode()}
