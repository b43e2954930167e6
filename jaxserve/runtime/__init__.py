"""Device side of a step: sampling, state, executables and the runner that owns them."""
