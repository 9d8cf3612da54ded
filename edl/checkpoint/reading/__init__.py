"""Reads checkpoints: for workers at any world size, and for programs outside of a job."""
