"""What it costs, measured."""
