"""The run folder: whose it is, what is written into it, and what a disk that fails does to a run."""
