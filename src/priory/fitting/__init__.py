"""The driver `fit`, and what it keeps: history, progress, callbacks, checkpoints, files."""
