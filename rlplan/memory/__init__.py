"""Memory: from a schedule and what its processes are to bytes after and inside each action."""
