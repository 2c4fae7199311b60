"""One run from its first process to its last: checks, start, each action when the schedule says so."""
