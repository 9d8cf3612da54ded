"""Keeps directories of an unmodified script alike on all nodes of a job (``--sync-dir``).

Pure: ``index`` (versions of files, and which version wins), ``settling`` (when a file counts as written, and in which
order), ``barrier`` (when workers may start), ``losses`` (which nodes have been lost), ``cut`` (what a lost node may
leave incomplete) and ``messages``. Around them: ``tree`` (the directories on disk), ``replica`` (one node's copy) and
``service`` (its threads). Connections to other launchers are in ``edl.adapters.file_copies``.
"""
