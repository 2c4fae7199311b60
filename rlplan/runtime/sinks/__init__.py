"""A run's numbers in other people's loggers."""
