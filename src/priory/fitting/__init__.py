"""The driver `fit`, with history, progress, callbacks, checkpoints and files."""
