"""Connections between Master, pservers and trainers: blocking sockets with deadlines, TLS, shared buffers, caller and
endpoint, the Master's connections to pservers, and a pserver's standard streams."""
