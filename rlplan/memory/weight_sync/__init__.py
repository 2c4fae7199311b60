"""What weight sync takes: how the weights are cut, and the staging of both sides."""
