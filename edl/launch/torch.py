"""``python -m edl.launch.torch``: a drop-in replacement for ``python -m torch.distributed.launch``."""

from __future__ import annotations

from edl.launch.__main__ import main
from edl.launch.options.workers import TORCH_LAUNCH

if __name__ == "__main__":
    main(TORCH_LAUNCH)
