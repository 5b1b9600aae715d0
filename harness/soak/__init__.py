"""One rank of a soak: its loop, its engine, its faults, what it tells."""
