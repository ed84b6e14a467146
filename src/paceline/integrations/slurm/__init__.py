"""Slurm: job scripts, checks before submission, and the state of jobs."""
