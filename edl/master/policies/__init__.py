"""Pure policies of the Master that can be switched off: the number of nodes by throughput, and dropped slots."""
