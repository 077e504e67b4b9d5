"""Run clients in this process: one by one, in worker processes, or together in one vectorised program."""
