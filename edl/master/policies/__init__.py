"""Policies that decide from measurements rather than from faults: pure, and each is optional."""
