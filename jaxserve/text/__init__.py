"""Text at the edges of the engine: tokenizing, chat templates, incremental detokenizing.

Knows tokens and strings; must not know jax, the scheduler's state or HTTP.
"""
