"""`rlplan ui`: a local page on which a job is changed and each change is answered at once."""
