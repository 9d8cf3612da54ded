"""Simulated workers that read data: the data service's lease machine in the Masters, its loader in the workers."""
