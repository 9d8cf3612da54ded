"""The agent's pure state machine: decides what a node does after each event."""
