"""The files of a job's history (``--history-dir``), which outlive the job.

- Writing: ``writer`` (a thread beside the Master), ``parts`` (names of the files, and which ones to delete).
- Reading: ``reading`` finds and reads files, ``merge`` orders the lines of several Masters, ``timeline`` and ``layout``
  show them.
"""
