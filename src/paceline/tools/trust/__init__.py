"""Runs that can be proved, compared, audited and replayed."""
