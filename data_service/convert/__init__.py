"""Conversion of any readable format to Arrow IPC files, the format that loads fastest."""
