"""Foreign settings that rlplan does not read: stacks without a table, and settings of a single role."""
