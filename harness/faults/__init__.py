"""What goes wrong on purpose: armed by a plan, counted by occasions."""
