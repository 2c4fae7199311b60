"""The planner turns a job into a plan: rules for what can run, the searches, and questions about a plan."""
