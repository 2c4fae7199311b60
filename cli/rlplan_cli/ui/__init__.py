"""`rlplan ui`: a local page on which a job is moved and answered at once."""
