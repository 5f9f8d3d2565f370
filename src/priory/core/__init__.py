"""Helpers without inference that all other packages use: errors, data, streams, linear algebra, special functions."""
