"""The radix tree of what is cached where: agreed state, without input or output."""
