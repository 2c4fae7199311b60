"""A plan in another stack's own keys: rows read backwards (backwards.py), and the folder they are started from."""
