"""How an epoch ends for all ranks at once: reports, one judgement, one seal."""
