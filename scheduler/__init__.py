"""Host-side scheduling: tokens, rows, pages, and time as an argument. Plain Python and numpy; never
jax."""
