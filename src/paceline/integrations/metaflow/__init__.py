"""Paceline inside Metaflow: `examples/metaflow/flow.py` is made of these. Needs the extra `paceline[metaflow]`."""
