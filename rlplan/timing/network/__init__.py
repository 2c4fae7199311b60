"""The cluster and its links, and the seconds of collectives between ranks."""
