"""Faults from outside: processes that are killed, disks that are full, folders that are read-only, several writers at once.

kills.py       commands that are killed at random moments     __main__.py  `python -m tests.faults`, which records them
test_kills.py  a few of them                                  test_commands.py  the other faults, at the command line
"""
