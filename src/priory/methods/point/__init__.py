"""Methods that find a point."""
