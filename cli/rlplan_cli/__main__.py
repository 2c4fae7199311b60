"""`rlplan`, and `python -m rlplan_cli` where the script is not on the path.

Beside the command line itself stands what Python's collector of cycles does while it starts and ends.
"""

import gc
from typing import NoReturn

FEW_COLLECTIONS = 400_000
"""Objects between two looks for cycles. Imports and a search make many that live to the end, 110,000 in `rlplan
estimate`: with Python's own 700 a sixth of it is spent on looking at them."""


def main() -> NoReturn:
    """Entry point of the command."""
    gc.set_threshold(FEW_COLLECTIONS)
    from rlplan_cli.app import main as run  # 250 modules

    try:
        run()
    finally:
        gc.freeze()  # Python looks once more when it ends, through every module: another tenth


if __name__ == "__main__":
    main()
