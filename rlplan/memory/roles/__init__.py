"""What each role's processes hold, action by action: on a CPU host and on GPUs."""
