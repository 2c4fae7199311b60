"""Images in a trainer: the decoder with the tower beside it says what the whole model says, sequence by sequence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplan.runtime.images.tower import attach_tower, get_tower, make_pillow_image
from rlplan.runtime.models.logprob_model import LogprobModel, make_batch
from rlplan.runtime.models.start_checkpoint import load_language_model, write_language_part
from rlplan.runtime.rollout.experience import PromptImage, SequencePair
from tests.runtime.images.with_images import IMAGE_TOKEN, write_with_processor

SIDE = 28


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the whole model, its language part)."""
    folder = tmp_path_factory.mktemp("images")
    write_with_processor(folder / "whole")
    write_language_part(folder / "whole", folder / "decoder")
    return folder / "whole", folder / "decoder"


def _image(first: int, rows: int, columns: int, seed: int) -> PromptImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)
    return PromptImage(first, rows, columns, SIDE, pixels.tobytes())


def _pairs() -> list[SequencePair]:
    first_image, two = _image(2, 2, 3, 1), _image(9, 1, 2, 2)
    pad = (IMAGE_TOKEN,)
    return [
        SequencePair((9, 8, *pad * 6, 7, *pad * 2, 12), (20, IMAGE_TOKEN, 21), (), (first_image, two)),
        SequencePair((9, 10, 11), (22, 23)),
        SequencePair((9, 8, *pad * 6, 7), (24, 25, 26, 27), (), (first_image,)),
    ]


def _whole_logprobs(whole: Any, processor: Any, pair: SequencePair) -> torch.Tensor:
    tokens = torch.tensor([[*pair.prompt_tokens, *pair.response_tokens]])
    inputs: dict[str, Any] = {}
    if pair.images:
        pixels = [make_pillow_image(image) for image in pair.images]
        kinds = torch.zeros_like(tokens)
        for image in pair.images:
            kinds[0, image.first : image.first + image.num_tokens] = 1
        inputs = dict(processor(images=pixels, return_tensors="pt")) | {"mm_token_type_ids": kinds}
        embedded = whole.get_input_embeddings()(tokens)
        features = whole.model.get_image_features(inputs.pop("pixel_values"), inputs["image_grid_thw"]).pooler_output
        embedded[0, kinds[0] == 1] = torch.cat(list(features))
        places, _ = whole.model.get_rope_index(tokens, **inputs)
        logits = whole(inputs_embeds=embedded, position_ids=places).logits[0]
    else:
        logits = whole(input_ids=tokens).logits[0]
    first = len(pair.prompt_tokens) - 1
    logprobs = logits[first:-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(pair.response_tokens).unsqueeze(-1)).squeeze(-1)


def test_packed_sequences_with_images_have_the_whole_models_logprobs(folders: tuple[Path, Path]) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration as Whole

    whole = Whole.from_pretrained(folders[0], dtype=torch.float32).eval()
    decoder = load_language_model(str(folders[1]))
    names = {name for name, _ in decoder.named_parameters()}
    attach_tower(decoder, folders[0])
    assert {name for name, _ in decoder.named_parameters()} == names, "the tower is none of the decoder's weights"
    tower = get_tower(decoder)
    assert tower is not None
    with torch.no_grad():
        ours = LogprobModel(decoder, 1.0, entropies="none")(make_batch(_pairs()))[0]
        theirs = torch.cat([_whole_logprobs(whole, tower.processor, pair) for pair in _pairs()])
    assert torch.allclose(ours, theirs, atol=1e-5), (ours - theirs).abs().max()
    blind = LogprobModel(decoder, 1.0, entropies="none")(
        make_batch([SequencePair(p.prompt_tokens, p.response_tokens) for p in _pairs()])
    )[0]
    assert (ours - blind).abs().max() > 1e-2, "images count"


def test_gradients_reach_every_weight_of_the_decoder_and_none_of_the_tower(folders: tuple[Path, Path]) -> None:
    decoder = load_language_model(str(folders[1]))
    attach_tower(decoder, folders[0])
    LogprobModel(decoder, 1.0, entropies="none")(make_batch(_pairs()))[0].sum().backward()
    tower = get_tower(decoder)
    assert tower is not None
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    assert all(parameter.grad is None for parameter in tower.module.parameters())
