"""Divide the update between the ranks (fills the slot SHARD)."""
