"""Connections between Master, pservers and trainers: blocking sockets with deadlines, TLS, shared buffers, the calling
and the called side, the Master's lines to pservers, and a pserver's standard streams."""
