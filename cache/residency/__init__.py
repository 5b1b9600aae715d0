"""What is resident in which tier, and how it is taken back."""
