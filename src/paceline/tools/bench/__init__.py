"""Micro-benchmarks: collectives, data pipeline and step, each measured alone and compared with its limit."""
