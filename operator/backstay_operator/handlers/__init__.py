"""From hints to passes: kopf's events put keys on our queue, workers look, decide and carry out.

kopf is in `watch` only. Watches are hints; the truth is what a pass LISTs.
"""
