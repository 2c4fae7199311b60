"""Worker processes: trainers, rollout engines and scorers, on one base class."""
