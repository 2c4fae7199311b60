"""Settings that hold for every test."""

from hypothesis import settings

# The same examples on every machine, and no deadline: a busy core is no failure.
settings.register_profile("rlplan", deadline=None, derandomize=True)
settings.load_profile("rlplan")
