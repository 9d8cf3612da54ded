"""Workers that read data: the data service's lease machine in the Masters, and its loader in the workers."""
