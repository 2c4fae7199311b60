"""How a file or a command line becomes a job: YAML as data, short forms."""
