"""Losses by the name under which an algorithm's declaration in `spec/` asks for them."""

from rlplan.runtime.losses.clipped_ratio import clipped_ratio, clipped_ratio_with_kl

LOSSES = {"clipped_ratio": clipped_ratio, "clipped_ratio_with_kl": clipped_ratio_with_kl}
