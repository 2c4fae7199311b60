"""The model families as data: tables of tensors, and how a config spells the sizes in them."""
