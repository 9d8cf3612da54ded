"""What all benchmark programs share: processes, a private etcd, launchers, step logs, tables."""
