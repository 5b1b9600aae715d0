"""What is cached where: agreed state, without input or output."""
