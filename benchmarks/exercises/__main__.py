"""`python -m benchmarks.exercises`: rewrite the parts of docs/exercises.md, and the table of suggested settings.

In: the planner. Out: docs/exercises.md and reports/planner/suggested_settings.*; about a minute. `--only-exercises`
leaves the table as it is.
"""

import sys

from benchmarks import suggest_settings
from benchmarks.exercises.page import PAGE, PARTS, fill_page


def main() -> int:
    """Rewrite the page, and the table of suggested settings."""
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(PARTS)} parts in {PAGE.name}")
    return 0 if "--only-exercises" in sys.argv[1:] else suggest_settings.main()


if __name__ == "__main__":
    sys.exit(main())
