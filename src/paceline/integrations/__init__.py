"""Paceline inside other people's orchestrators. Each file needs the extra of its name."""
