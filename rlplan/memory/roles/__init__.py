"""Memory of each role's processes, action by action: on a CPU host and on GPUs."""
