"""Python scripts that make a trainer, read from their syntax trees: nothing of them is imported or run."""
