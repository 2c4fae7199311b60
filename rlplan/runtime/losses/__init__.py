"""The torch side of an algorithm, found by the names that its torch-free declaration in `spec/` gives."""
