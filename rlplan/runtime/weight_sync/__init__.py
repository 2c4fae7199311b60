"""The trainer's weights on their way to the engines: who sends, who receives, what is checked."""
