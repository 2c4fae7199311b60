"""Import of TRL: its commands, its trainers, and the settings of transformers and accelerate beside it."""
