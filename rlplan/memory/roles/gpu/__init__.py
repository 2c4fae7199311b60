"""What one rank of each role holds on its GPU and on its host, action by action."""
