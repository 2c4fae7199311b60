"""Rule-based rewards, computed in child processes."""
