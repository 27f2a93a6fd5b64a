"""Measures Backstay against the limits of the machine it runs on; see `__main__`."""
