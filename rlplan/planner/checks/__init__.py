"""Jobs that are refused before anything is counted: by target, by model and by GPU."""
