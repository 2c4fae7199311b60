"""Reports of runs: the only package that imports pandas and jinja2. Import its modules by name."""
