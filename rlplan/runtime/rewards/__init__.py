"""Rewards that follow rules: judged in processes of their own."""
