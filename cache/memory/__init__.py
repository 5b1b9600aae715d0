"""Facts of this rank: its physical pages and tensors."""
