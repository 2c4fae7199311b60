"""The release of rlplan. This module imports nothing, so that every part of the package can read it."""

__version__ = "0.1.0"
