"""The parts that every engine with a cache of its own needs around the protocol, written once."""
