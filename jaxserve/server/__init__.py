"""The HTTP front of an engine. Knows `EngineClient` and plain data; never jax or the engine."""
