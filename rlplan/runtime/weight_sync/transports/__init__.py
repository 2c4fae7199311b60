"""How packets travel: one file a transport, found by name."""
