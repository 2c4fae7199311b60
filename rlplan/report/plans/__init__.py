"""Reports of plans and simulations, which contain no measurements."""
