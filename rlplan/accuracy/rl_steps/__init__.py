"""Points about whole RL steps, and about weight sync between two of them."""
