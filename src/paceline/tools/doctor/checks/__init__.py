"""The checks, as pure functions of facts."""
