"""Spare interpreters: Python processes that have imported the framework before a rank needs them.

After a failure, a restarted rank spends most of its time with imports. So the agent of a host keeps
a spare for each of its ranks (`pool`). A spare is started with the command of the rank (`command`),
and waits in `agent/hook/sitecustomize.py`, before Python runs the script.
"""
