"""A fake of Kubernetes for tests: API server, a few controllers, and a kubelet whose pods are local processes.

It is a fake: README.md beside this file says what it does, and what a real cluster does that it does not.
"""
