"""``kvpact scenario``: a story as a TOML file, run in the simulator or with real processes."""
