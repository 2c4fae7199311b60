"""A run in a terminal: while it goes on, from another terminal, and at its end."""
