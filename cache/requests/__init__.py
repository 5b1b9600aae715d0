"""What live requests hold, and what a scheduler was promised for them."""
