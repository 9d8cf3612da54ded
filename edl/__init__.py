"""edl: distributed training jobs that survive failures and change size while they run.

Importing this package is cheap: it loads no framework and no network library. The command line is ``python -m
edl.launch``.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
"""The version of edl; which versions work together: docs/release.md."""
