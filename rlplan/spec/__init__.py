"""What the user says: frozen pydantic models that refuse unknown keys."""
