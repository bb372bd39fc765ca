"""`pdq bench`: load for any OpenAI-compatible server, and what its clients would have seen of it.

    settings ─> prompts ─> load ─> client ─HTTP─> server
                                     └─> records ─> summary ─> report, plots, files

Knows the server by its HTTP API alone: nothing here reads pdq's queue, so that two servers can be compared. What each
figure means is written in records.py.
"""
