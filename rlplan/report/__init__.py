"""Reports of runs: the only package that imports pandas, matplotlib and jinja2. Import its modules by name."""
