"""The gateway: agents call the policy through an OpenAI endpoint, which records their conversations as rollouts."""
