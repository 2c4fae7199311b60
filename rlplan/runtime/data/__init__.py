"""Data sets, chat templates and tokenizers: from rows to prompts."""
