"""`python -m lastgood.cluster.testbed.guard NAME`: takes a testbed down when the process that made it has ended.

It reads its standard input, which that process holds open: ``done`` means that nothing is left to do; the end of the
input without that means that the maker was ended, perhaps by SIGKILL.
"""

from __future__ import annotations

import signal
import sys

from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import LastgoodError

__all__ = ["main"]


def main() -> int:
    """Wait for the end of the input; 0 if nothing is left of the testbed."""
    # Ctrl-C and a closed terminal are for the maker, whose end this waits for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stdin.readline().strip() == "done":
        return 0
    try:
        Testbed.remove(sys.argv[1])
    except LastgoodError as error:
        sys.stderr.write(f"lastgood testbed: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
