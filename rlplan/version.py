"""The release of rlplan, in a module that imports nothing, so that every part of the package may read it."""

__version__ = "0.1.0"
