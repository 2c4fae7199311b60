"""Entry point of `rlplan` and of `python -m rlplan_cli`, with settings of Python's garbage collector for speed."""

import gc
from typing import NoReturn

FEW_COLLECTIONS = 400_000
"""Allocations between two garbage collections. Imports and a search create many objects that live to the end (110,000
in `rlplan estimate`); Python's default of 700 would spend a sixth of the run time on them."""


def main() -> NoReturn:
    """Entry point of the command."""
    gc.set_threshold(FEW_COLLECTIONS)
    from rlplan_cli.app import main as run  # imported after the threshold is set, because it loads 250 modules

    try:
        run()
    finally:
        gc.freeze()  # saves the final collection at exit, a tenth of the run time


if __name__ == "__main__":
    main()
