"""Shell scripts: read with tree-sitter's grammar of bash, never run."""
