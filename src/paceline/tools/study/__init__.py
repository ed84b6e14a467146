"""The scaling study: a grid of ordinary runs, their measurements, and the conclusions."""
