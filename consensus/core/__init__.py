"""The protocol as pure code: no tensors, threads, clocks or input and output."""
