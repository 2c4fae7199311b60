"""Images in prompts: from a row of a data set to the embeddings that a policy sees."""
