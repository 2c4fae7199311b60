"""Settings that hold for every test."""

import os

from hypothesis import settings

# The same examples on every machine, and no deadline: a busy core is no failure.
settings.register_profile("rlplan", deadline=None, derandomize=True)
settings.load_profile("rlplan")
# Readline, which comes along where tests run side by side, writes a terminal's size there: tables would be narrow.
os.environ.pop("COLUMNS", None)
