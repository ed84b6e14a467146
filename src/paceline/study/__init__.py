"""The scaling study: a grid of ordinary runs, what they measured, and what follows from it."""
