"""Run clients in this process: one by one, in workers, or in one vectorised program."""
