"""Paceline as steps of a Runnable pipeline. Needs the extra `paceline[runnable]`."""
