"""One step on one rank: the ballot is posted, its verdict awaited and settled; the next epoch."""
