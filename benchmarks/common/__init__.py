"""Shared by all benchmark programs: processes, a private etcd, launchers, step logs, tables."""
