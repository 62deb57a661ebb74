"""Paging in the engine: a rank's chunks in their tiers, and the copies between them."""
