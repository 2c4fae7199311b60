"""Assertions on a program's results, evaluated outside its sandbox so that the program cannot forge a verdict."""
