"""The launcher's side of a job: its agents, its plan, its output, its restarts."""
