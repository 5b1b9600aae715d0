"""What an operator runs around a replica: ``kvpact doctor``, ``kvpact store``."""
