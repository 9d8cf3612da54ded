"""The launcher: from its command line to a running node.

The main path: ``__main__`` (entry point), ``resolved_options`` and ``cli`` (options to ``settings``), ``compose``
(builds the parts), ``store_opening``, ``registration`` (both use ``stored_runs``), ``node_checkpoints``, ``wiring``
(connects candidate, agent and launcher) and ``launcher`` (runs them).

- Options: the table ``options``; ``effective_options`` (for ``edl config``); the subjects ``data_option``,
  ``denylist_options``, ``history_options``, ``http_options``, ``leave_options``, ``log_options``, ``notify_options``,
  ``otlp_options``, ``ps_options``, ``replica_options``, ``scale_options``, ``slot_options``, ``store_options`` and
  ``sync_options``; ``spelling`` and ``naming``.
- Command lines of other launchers: ``dropin_table``; ``torch``, ``torchrun_options``, ``torchrun_store``,
  ``torchrun_table``; ``paddle``, ``paddle_devices``, ``paddle_options``, ``paddle_table``, ``script_servers``;
  ``cluster_env`` for the variables of schedulers.
- Jobs from Python: ``api``, ``api_options``, ``function_launch``.
- Helper processes: ``helpers``, ``helper_process``, ``helper_role`` (a launcher of nothing else), ``readers``,
  ``pservers``. The Master's companions: ``scaling`` for the scheduler, ``watching`` for watchdogs and notifications,
  ``denylist_companion``; ``disk_watch`` and ``hang_sources`` in every launcher.
- Directories of the script that are kept alike on all nodes: ``synced_dirs``.
- This host: ``accelerators``, ``addresses``, ``descriptors``, ``numa_binding`` (binds workers to cores),
  ``preemption_notices``.
- Around a run: ``node_answers`` (to commands), ``console``, ``lease_guard``, ``lease_length``, ``leave_signals``,
  ``node_facts`` (for metrics), ``node_output`` (for the dashboard), ``origin``, ``recorders`` (``history_recording``,
  ``trace_export``), ``reporting``, ``script_check``, ``temporary_files``, ``watchdog``.
"""
