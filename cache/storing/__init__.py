"""The ways between the host and the storage: prefetch, put, clear; attached or not."""
