"""Parameter-server checkpoints on disk: the manifest and the files of rows, how they are written, found and read
back."""
