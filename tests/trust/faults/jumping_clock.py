"""A driver whose wall clock jumps: `python -m tests.trust.faults.jumping_clock SECONDS AFTER_S ARGUMENTS` of `rlplan`.

Deadlines are counted on the monotonic clock, which no administrator and no time server moves.
"""

import sys
import time

from rlplan_cli.app import main

if __name__ == "__main__":
    jump_s, after_s = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    read_clock, start_s = time.time, time.monotonic()

    def jumping() -> float:
        return read_clock() + (jump_s if time.monotonic() - start_s > after_s else 0.0)

    time.time = jumping
    main()
