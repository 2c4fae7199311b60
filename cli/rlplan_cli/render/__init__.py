"""Output in a terminal: tables, sentences, errors, progress."""
