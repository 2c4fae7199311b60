"""Jobs that are refused before anything is counted: by trainer, by model and by GPU."""
