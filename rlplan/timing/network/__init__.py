"""The cluster and its links: seconds of collectives between ranks."""
