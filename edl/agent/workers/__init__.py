"""The worker processes of one node: environment, ports, output, hangs and exits."""
