"""How attempts begin: the member in every sidecar, the leader in replica 0's."""
