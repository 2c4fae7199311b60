"""Images in prompts: from a data set's row to the embeddings that a policy gets."""
