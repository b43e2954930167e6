"""Measurements. May import everything; nothing imports it."""
