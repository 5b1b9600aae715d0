"""The promises, checked from outside: after each step, and from the journals."""
