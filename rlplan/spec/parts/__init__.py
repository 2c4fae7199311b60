"""The parts of a job, each a frozen model."""
