"""The models themselves: where they come from, their heads and adapters, ranks that share one."""
