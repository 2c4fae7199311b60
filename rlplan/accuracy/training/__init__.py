"""Predictors of training runs: peaks, steady states, throughput, the largest model that fits."""
