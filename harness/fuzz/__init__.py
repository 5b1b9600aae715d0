"""``kvpact fuzz``: random worlds, each from one seed, and what makes them small."""
