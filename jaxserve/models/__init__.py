"""Model definitions: the configuration, and the modules built from it."""
