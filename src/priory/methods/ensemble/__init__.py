"""Ensembles, SWAG and dropout: posteriors from several networks, or from one network under many masks."""
