"""Facts about a node, gathered without meeting anybody. Nothing here imports torch: it may be what is broken."""
