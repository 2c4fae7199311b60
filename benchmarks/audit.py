"""Known vulnerabilities of the locked packages: pip-audit's answer in a sentence, and whether there was one at all.

In: a lock, and pip-audit beside this interpreter. Out: exit code 0, or 1 where a locked release has a known
vulnerability. Where no index with advisories can be reached, the sentence says so, and the exit code is 0.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 600


def summarize(dependencies: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """(the exit code, lines for the user) of pip-audit's list of packages.

    >>> summarize([{"name": "a", "skip_reason": "not found"}])
    (0, ['audit: not made: the index has no advisories on any of the 1 packages'])
    >>> summarize([{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}])
    (1, ['a 1: X-1, fixed in 2', 'audit: 1 of 1 packages has a known vulnerability'])
    """
    looked_up = [package for package in dependencies if "vulns" in package]
    if not looked_up:
        return 0, [f"audit: not made: the index has no advisories on any of the {len(dependencies)} packages"]
    lines = [
        f"{package['name']} {package['version']}: {fault['id']}, fixed in {', '.join(fault['fix_versions']) or 'none'}"
        for package in looked_up
        for fault in package["vulns"]
    ]
    count = sum(bool(package["vulns"]) for package in looked_up)
    words = "has a known vulnerability" if count == 1 else "have known vulnerabilities"
    missing = len(dependencies) - len(looked_up)
    unknown = f"; nothing is known of {missing} more" if missing else ""
    return int(count > 0), [*lines, f"audit: {count} of {len(looked_up)} packages {words}{unknown}"]


def main(lock: str) -> int:
    """Audit a lock."""
    command = [str(Path(sys.executable).parent / "pip-audit"), "--no-deps", "--disable-pip", "--format", "json"]
    try:
        done = subprocess.run(
            [*command, "--require-hashes", "-r", lock], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        dependencies = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        print(f"audit: not made: pip-audit gives no answer, such as without a network ({type(error).__name__})")
        return 0
    code, lines = summarize(dependencies)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
