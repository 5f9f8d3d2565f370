"""Models: `Model`, `Density`, and `Target`, the log joint in nats for the whole data set."""
