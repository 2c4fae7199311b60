"""Memory that belongs to no model: allocator, libraries, the host's memory and processes beside the roles', spreads."""
