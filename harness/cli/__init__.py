"""The command ``kvpact``: its flags, and what it prints."""
