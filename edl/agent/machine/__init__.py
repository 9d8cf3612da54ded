"""The agent's pure state machine: what a node does next, given what has happened to it."""
