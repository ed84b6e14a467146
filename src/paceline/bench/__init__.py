"""Micro-benchmarks: collectives, data pipeline and step, each alone and against its limit."""
