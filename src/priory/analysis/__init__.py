"""Work with several fits: compare methods, sweep temperatures, stack or average posteriors, prune networks."""
