"""The anatomy of a language model: tensors and shapes of each family, read from configs and headers as data."""
