"""The four tiers behind one interface (base.py)."""
