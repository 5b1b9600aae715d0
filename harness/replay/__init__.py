"""``kvpact replay``: a trace through the caches of all ranks."""
