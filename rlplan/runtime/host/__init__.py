"""What this machine has and lacks: GPUs, packages, the keys that installed engines know."""
