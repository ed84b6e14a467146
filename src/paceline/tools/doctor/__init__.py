"""Checks whether this machine or allocation can train. Each problem has a remedy."""
