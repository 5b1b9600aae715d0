"""Residency: what is in which tier, and how it is taken back."""
