"""Commits of a worker whose backend is asynchronous, with a fault at any instruction.

``python -m edl.testing.commits`` plays random schedules.
"""
