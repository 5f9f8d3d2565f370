"""Point estimates: the mode of the posterior, and a noise set on held-out rows."""
