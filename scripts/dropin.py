"""What becomes of other launchers' options here, held against their own parsers as they are installed.

    python -m scripts.dropin torchrun
    python -m scripts.dropin paddle

prints every option, its default there and what it is here, then the exceptions with their reasons. It needs that
launcher's framework. The unit tests see to it that nothing is missing.
"""

from __future__ import annotations

import importlib
import sys

LAUNCHERS = ("torchrun", "paddle")


def main(arguments: list[str]) -> int:
    """Print the table of one launcher; returns the exit status."""
    if len(arguments) != 1 or arguments[0] not in LAUNCHERS:
        print(f"python -m scripts.dropin {'|'.join(LAUNCHERS)}", file=sys.stderr)
        return 2
    try:
        print(importlib.import_module(f"scripts.dropin_{arguments[0]}").main())
    except ImportError as error:
        print(f"{arguments[0]} is not installed here: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
