"""``python -m edl.launch.paddle``: a drop-in replacement for ``python -m paddle.distributed.launch``."""

from __future__ import annotations

from edl.launch.__main__ import main

if __name__ == "__main__":
    main("paddle")
