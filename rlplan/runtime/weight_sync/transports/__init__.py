"""Transports of packets: one file per transport, found by name."""
