"""``kvpact search``: small worlds, exhaustively."""
