"""What is believed: `Model`, `Density`, and `Target`, the log joint in nats for the whole data."""
