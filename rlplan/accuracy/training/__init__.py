"""Points about training: peaks, steady states, throughput, the largest model that trains."""
