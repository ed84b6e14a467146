"""What is right and what is not, as pure functions of facts."""
