"""Paceline from Python: `paceline.train`, `paceline.load_run` and what they return. Guide: docs/guides/library.md."""
