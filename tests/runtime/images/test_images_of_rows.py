"""Images of rows: what is read, how many tokens stand for it, and what is refused, hostile files among it."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlplan.errors import SpecError
from rlplan.planner.rules import find_job_refusals
from rlplan.runtime.data.layouts import BadRowError
from rlplan.runtime.data.prompt_sets import PromptSets, load_prompts
from rlplan.runtime.images.decoding import BadImageError, decode
from rlplan.runtime.images.in_rows import read_image, split_into_parts
from rlplan.spec.files.job_file import load_job
from rlplan.spec.models.families.image_sizes import ImageRule
from rlplan.spec.resolved import resolve_on_cpu, settle
from tests.factories import EXAMPLES
from tests.runtime.images.with_images import IMAGE_TOKEN, image_job

RULE = ImageRule(patch=14, merge=2, min_pixels=28 * 28, max_pixels=28 * 28 * 16)


def png(width: int, height: int, color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(28, 28), (480, 640), (1000, 30), (3000, 2000), (57, 83), (1, 150), (13, 13)])
@pytest.mark.parametrize("limits", [(3136, 1003520), (784, 12544), (784, 200704)])
def test_tokens_are_counted_as_transformers_counts_them(size: tuple[int, int], limits: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rows, columns = ImageRule(14, 2, *limits).grid(*size)
    wanted = smart_resize(*size, factor=28, min_pixels=limits[0], max_pixels=limits[1])
    assert (rows * 28, columns * 28) == wanted


def test_pixels_are_those_of_the_processor() -> None:
    import numpy as np
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    noise = np.random.default_rng(1).integers(0, 256, (61, 90, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    decoded = decode(file.getvalue(), RULE)
    shape = (decoded["rows"] * 28, decoded["columns"] * 28, 3)
    ours = Image.fromarray(np.frombuffer(base64.b64decode(decoded["pixels"]), np.uint8).reshape(shape))
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": RULE.min_pixels, "longest_edge": RULE.max_pixels})
    own_values = processor(images=[ours], do_resize=False, return_tensors="np")["pixel_values"]
    theirs = processor(images=[Image.fromarray(noise)], return_tensors="np")["pixel_values"]
    assert np.abs(own_values - theirs).max() < 1e-6


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bomb(60000, 60000), "DecompressionBombError"),
        (bomb(12000, 12000), "12000 x 12000 pixels"),
        (bomb(2000, 2000), "cannot be read"),
        (b"GIF89a" + b"\0" * 50, "cannot be read"),
        (b"", "cannot be read"),
        (png(56, 56)[:60], "cannot be read"),
        (png(3000, 2), "200 times"),
    ],
)
def test_a_hostile_image_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadImageError, match=why):
        decode(data, RULE)


def test_an_image_is_a_path_a_data_uri_or_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(56, 56))
    packed = base64.b64encode(png(56, 56)).decode()
    cells: list[Any] = ["a.png", f"data:image/png;base64,{packed}", {"bytes": packed, "path": None}, {"path": "a.png"}]
    assert {read_image(cell, tmp_path) for cell in cells} == {png(56, 56)}


@pytest.mark.parametrize(
    "cell", ["/etc/hostname", "../a.png", "http://host/a.png", "missing.png", 7, "", "data:image/png,x", "out.png", "."]
)
def test_what_is_no_image_of_the_data_is_a_bad_row(tmp_path: Path, cell: Any) -> None:
    (tmp_path / "a.png").write_bytes(png(56, 56))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "out.png").symlink_to(tmp_path / "a.png")
    with pytest.raises(BadRowError):
        read_image(cell, tmp_path / "data")


def test_images_stand_at_their_marks_or_before_the_first_question() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "color?"}]
    assert split_into_parts(chat, 1)[1]["content"] == [{"type": "image"}, {"type": "text", "text": "color?"}]
    with pytest.raises(BadRowError, match="2 <image> marks in the prompt, and 1 images in its row"):
        split_into_parts([{"role": "user", "content": "<image> or <image>?"}], 1)


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_job(tmp_path_factory.mktemp("job"))


def _load(job_file: Path, *overrides: str) -> PromptSets:
    return load_prompts(resolve_on_cpu(load_job(job_file, overrides)))


def test_prompts_have_a_token_for_every_part_of_their_images(job_file: Path) -> None:
    first = _load(job_file).train[0]
    (image,) = first.images
    assert (image.rows, image.columns, len(image.pixels)) == (2, 2, 56 * 56 * 3)
    assert first.tokens[image.first : image.first + 4] == (IMAGE_TOKEN,) * 4
    assert first.tokens.count(IMAGE_TOKEN) == 4
    assert image.pixels[0] > 200 > 60 > image.pixels[1], "it is red"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image": "none.png"}, "row 2: the image none.png"),
        ({"prompt": "<|image_pad|> <image> color ?"}, "row 2: the prompt has 2 image tokens, but its row has 1 images"),
        ({"image": ["1.png", "2.png"]}, "row 2: 1 <image> marks in the prompt, and 2 images in its row"),
        ({"image": ["1.png"] * 17}, "row 2: 17 images, at most 16"),
        ({"image": "job.yaml"}, "row 2: an image that cannot be read"),
    ],
)
def test_a_row_whose_images_do_not_fit_is_told_by_its_number(job_file: Path, change: dict[str, Any], why: str) -> None:
    rows = [json.loads(line) for line in (job_file.parent / "train.jsonl").read_text().splitlines()]
    rows[1] |= change
    (job_file.parent / "changed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SpecError, match="1 of 16 rows cannot be used") as caught:
        _load(job_file, "data.prompts=changed.jsonl")
    assert why in str(caught.value)


def test_bytes_of_hugging_faces_image_feature_are_read_from_parquet(job_file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    packed = {"bytes": png(56, 56, "blue"), "path": "blue.png"}
    rows = [{"prompt": f"w{n} color ?", "answer": "blue", "image": packed} for n in range(16)]
    pa.parquet.write_table(pa.Table.from_pylist(rows), job_file.parent / "rows.parquet")
    (image,) = _load(job_file, "data.prompts=rows.parquet").train[0].images
    assert image.pixels[:3] == b"\x00\x00\xff"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("policy.init=random", "images are not supported with policy.init random"),
        ("training.lora={rank: 4}", "images are not supported with training.lora"),
        ("rollout.speculative_tokens=2", "images are not supported with rollout.speculative_tokens"),
        ("policy.path=LLAMA", "images need a policy of Qwen2_5_VLForConditionalGeneration"),
    ],
)
def test_a_job_that_has_no_images_is_refused_by_name(job_file: Path, override: str, why: str) -> None:
    override = override.replace("LLAMA", str(EXAMPLES / "models" / "sorter"))
    assert any(why in reason for reason in find_job_refusals(settle(load_job(job_file, [override]))))
