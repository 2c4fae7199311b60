"""Colours of kinds stay apart for every reader, and each kind, phase and resource has its own."""

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from rlplan.report import style
from rlplan.timing.cost import Resource
from rlplan.vocabulary import MemoryKind, Phase

VISION = {
    "full colour vision": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
MAIN = ("weights", "master_weights", "optimizer", "gradients", "kv_cache", "activations", "logits")


def lab(color: str, vision: NDArray[np.float64]) -> NDArray[np.float64]:
    """L*a*b* of `#rrggbb` as somebody sees it."""
    rgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION.values(), ids=VISION)
def test_colors_of_kinds_stay_apart(vision: NDArray[np.float64]) -> None:
    seen = {str(kind): lab(color, vision) for kind, color in style.KIND_COLORS.items()}
    for first, other in combinations(seen, 2):
        least = 23 if first in MAIN and other in MAIN else 14
        assert np.linalg.norm(seen[first] - seen[other]) >= least, (first, other)


def test_every_kind_phase_and_resource_has_its_own_color() -> None:
    for colors, words in (
        (style.KIND_COLORS, MemoryKind),
        (style.PHASE_COLORS, Phase),
        (style.RESOURCE_COLORS, Resource),
    ):
        assert set(colors) == set(words)
        assert len(set(colors.values())) == len(colors)
