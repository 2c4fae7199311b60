"""Reports of plans, of which nothing has been measured, and of plans and runs side by side."""
