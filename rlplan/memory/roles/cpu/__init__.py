"""What the processes of each role hold on a CPU host, action by action."""
