"""Ranks put together and started: simulated in one thread, or as real processes."""
