"""Moves shards outwards: seals slots, fills tiers, keeps copies for others, tells the leader."""
