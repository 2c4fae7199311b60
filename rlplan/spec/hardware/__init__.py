"""What machines offer: profiles as data, by name, each value with its source."""
