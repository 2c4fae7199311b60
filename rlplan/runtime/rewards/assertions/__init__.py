"""Assertions about a program, evaluated outside of its sandbox."""
