"""The transports of one process: clients one by one, in worker processes, or all as one program."""
