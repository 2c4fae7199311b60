"""Bytes of a model itself: parameters, quantized weights, activations and logits of a pass."""
