"""What runs in processes of its own: trainers, engines and scorers, on one base."""
