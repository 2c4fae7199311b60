"""Charts and bars as data, which the scripts in assets/ draw."""
