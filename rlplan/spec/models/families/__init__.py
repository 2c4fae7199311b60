"""The model families as data: tables of tensors, and how a config spells what fills them."""
