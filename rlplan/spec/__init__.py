"""The user's input: frozen pydantic models that refuse unknown keys."""
