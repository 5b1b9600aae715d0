"""Live requests: what they hold, and what a scheduler was promised for them."""
