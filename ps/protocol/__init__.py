"""The protocol between Master, pservers and trainers: messages, frames, requests, replication stream and handshake.
Pure: bytes and values in, bytes and values out."""
