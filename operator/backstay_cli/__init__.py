"""The `backstay` command: local runs, looking at checkpoints, pulling and verifying them."""
