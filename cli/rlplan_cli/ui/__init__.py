"""`rlplan ui`: a local page to edit a job, which shows at once whether it fits."""
