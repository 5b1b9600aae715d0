"""How ranks reach each other: the one collective, the store, and who was last seen where."""
