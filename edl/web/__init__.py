"""The Master's HTTP interface: the size of the job as JSON."""
