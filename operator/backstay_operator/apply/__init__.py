"""What was decided, carried out: one status write a pass, then the plan's actions, then Events.

`applier` is the only module that changes the cluster; the others build what it sends and are pure.
"""
