"""Ways to move bytes between workers."""
