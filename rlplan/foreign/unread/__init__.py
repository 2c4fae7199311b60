"""Stacks without a mapping table, which are known by their commands and keys and refused by name."""
