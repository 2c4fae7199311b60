"""Ray on one or several hosts: reserved devices, worker actors, and calls to them."""
