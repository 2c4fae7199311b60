"""The driver of a run: preflight checks, start of processes, execution of the schedule's actions."""
