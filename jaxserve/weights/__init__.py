"""Checkpoints on disk: what model they hold, and its tensors as named numpy arrays. Never jax."""
