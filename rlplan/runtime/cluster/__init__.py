"""Processes on hosts: Ray, the devices reserved on it, the workers' actors and their addresses."""
