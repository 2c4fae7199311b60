"""From a job to a plan: what can run, what is tried, what is chosen, and what is said when nothing fits."""
