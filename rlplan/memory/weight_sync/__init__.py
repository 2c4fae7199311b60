"""Memory of a weight sync: the buckets and packets of the weights, and the staging on both sides."""
