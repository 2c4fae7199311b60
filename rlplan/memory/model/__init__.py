"""What a model itself weighs: parameters, quantised weights, activations and logits of a pass."""
