"""Charts and bars as data: what assets/ draws."""
