"""Reports of plans and simulations, of which nothing has been measured."""
