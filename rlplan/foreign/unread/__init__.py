"""What other stacks say and rlplan does not read: whole stacks without a table, and settings of a role of their own."""
