"""What one RL step consists of, and where each action of it is done: the schedule."""
