"""Answers to questions about plans: explanations, what-ifs, limits, costs, simulations and comparisons with measured
steps.
"""
