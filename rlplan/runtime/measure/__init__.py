"""What is measured: memory of processes, a step's numbers, leaks, traces of models, rates of this machine."""
