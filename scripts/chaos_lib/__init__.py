"""What scripts/chaos consists of: events drawn from a seed, done to the processes of a real run."""
