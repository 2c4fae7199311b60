"""Seconds of training and scoring on GPUs: passes, ZeRO's traffic, the optimizer's step."""
