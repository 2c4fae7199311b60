"""What packets hold: every weight, what has changed, or an adapter."""
