"""The agent in every pod: seals, moves and serves shards, leads restores. Never imports torch."""
