"""The operator: what a TrainingJob is, which pods it needs, and what to do when they fail.

The parts that are here are pure (`api`, `manifests`, `decide`); the local runner uses them as the
control loop will.
"""
