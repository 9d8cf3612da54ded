"""Notifications: the job's events sent by webhook, mail, a program, or apprise.

Everything that is worth a notification is in the job's history (``notification`` says with which severity), so
``shell`` reads the history beside the Master, and stores for each channel the number of the last entry that was sent:
the next Master continues there. ``delivery`` retries. The channels are in ``webhook``, ``mail``, ``program`` and
``others``; ``addresses`` makes them from URLs.
"""
