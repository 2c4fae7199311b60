"""The first minute: a job to begin with, its schema for editors, the pages."""
