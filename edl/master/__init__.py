"""The Master.

- Its pure machine: ``machine`` handles each of the ``events`` in a ``turn`` on the ``state``. What a handler decides is
  in ``forming`` (the next world), ``awaiting`` (whom it waits for), ``resting`` (a suspended job), ``incidents``
  (workers that fail or hang), ``planning`` (step boundaries), ``restoring`` (the commit to begin from), ``dropping``
  (slots), ``denylist``, ``alarms`` (of watchdogs), ``checking`` (the nodes' health), ``away`` (nodes that leave and
  return), ``hyper`` (batch and learning rate), ``straggling`` (ranks that the others wait for), ``sizing``,
  ``resizing`` and ``autoscaling`` (the number of nodes), and ``policies``.
  ``invariants`` lists what holds after every step.
- Its shell: ``shell``, with ``companions``, ``guarded`` (writes under the fencing token), ``history``, ``chronicle``
  (the lines of the history files), ``farewell`` (what an ended job leaves), ``gathered_reports`` (what can wait for the
  next decision), ``probing``, ``stored`` (the record in the store), ``streams`` (the agents), ``totals`` (counters for
  metrics), ``view`` (the status), ``watches`` (of the store) and ``goodput`` (what the slots spend their time on).
- Machines of services beside it, such as the data service: ``service`` (the interface) and ``hosting``.
- The election, in every launcher: ``election`` is the machine, ``candidate`` its shell.
"""
