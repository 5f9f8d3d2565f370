"""Several fits side by side: compare, sweep, stack, prune."""
