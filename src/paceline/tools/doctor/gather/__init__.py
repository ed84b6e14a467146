"""Gathers facts about one node, without other nodes. Nothing here imports torch: torch may be broken."""
