"""Several networks, or one network many times."""
