"""The agent in every pod: seals, moves and serves shards, and leads restores. Never imports torch."""
