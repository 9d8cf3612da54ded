"""Reads a checkpoint directory: workers at any world size, and programs outside of any job."""
