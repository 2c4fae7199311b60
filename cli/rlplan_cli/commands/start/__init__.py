"""Commands for the first steps: a new job, its schema for editors, the documentation, the local page."""
