"""Moving bulk bytes: direct disk writes, receiving copies, uploads. Knows no tier and no policy."""
