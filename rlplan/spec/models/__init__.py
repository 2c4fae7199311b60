"""What a language model consists of: tensors and shapes of each family, read from configs and headers as data."""
