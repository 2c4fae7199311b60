"""Contents of packets: all weights, only the changed elements, or an adapter."""
