"""Everything that is drawn in a terminal."""
