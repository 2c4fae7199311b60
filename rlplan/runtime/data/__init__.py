"""Data sets, chat templates and tokenizers: rows become tokenized prompts."""
