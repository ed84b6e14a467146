"""Is this machine, or this allocation, fit to train: what stands in the way, and what to do about it."""
