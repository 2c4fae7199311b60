"""Checks of this machine: GPUs, packages, configuration keys of the installed engines."""
