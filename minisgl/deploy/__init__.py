"""Our engine under other programs that start and stop replicas of it."""
