"""Keeps directories of an unmodified script alike on all nodes of a job (``--sync-dir``).

Pure: ``index`` (versions of files, and which version wins) and ``settling`` (when a file counts as written, and in which
order). Around them: ``tree`` (the directories on disk), ``replica`` (one node's copy) and ``barrier`` (waits until all nodes
of a world have the same files). The connections to other launchers are in ``edl.adapters.file_copies``.
"""
