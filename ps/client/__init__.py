"""The trainer's side: reading and writing rows on the pservers, the session with the Master, the tables of a script,
and the export of weights for inference."""
