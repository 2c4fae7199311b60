"""What is answered of a plan: explanations, what changes would bring, simulated steps, files."""
