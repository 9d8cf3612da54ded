"""Trainers that others wrote, with edl's recovery: one module for each.

Nothing else in edl imports these modules or the packages that they are for.
"""
