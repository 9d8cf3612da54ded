"""What Master, pservers and trainers say to each other, and how it is laid out as bytes: messages, frames, requests,
the replication stream and the handshake. Pure: bytes and values in, bytes and values out."""
