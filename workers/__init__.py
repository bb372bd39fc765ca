"""The two worker programs, run as `python -m pdq.workers.prefill` and `python -m pdq.workers.decode`."""
