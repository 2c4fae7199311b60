"""Commands that answer questions about plans: explain, simulate, compare, solve, calibrate."""
