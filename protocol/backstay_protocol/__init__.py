"""What Backstay's parts say to each other: names, messages, layouts and the decisions they share.

Standard library only. The sidecar, the trainer library, the operator, the local runner and the
command import it; it imports none of them.
"""
