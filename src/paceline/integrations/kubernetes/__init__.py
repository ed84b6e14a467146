"""Kubernetes: manifests, checks before submission, the state and logs of jobs, and the gang of pods."""
