"""TRL: its commands, its trainers, and what transformers and accelerate are told beside it."""
