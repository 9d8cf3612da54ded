"""Finds stragglers: ranks that the others wait for. Pure.

``windows`` compares the ranks of a world in one window; ``streaks`` turns several windows in a row into a verdict.
"""
