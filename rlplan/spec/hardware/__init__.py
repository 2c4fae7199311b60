"""The capabilities of machines: profiles as data, by name, each value with its source."""
