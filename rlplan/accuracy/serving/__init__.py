"""Points about engines: what they hold, and how fast they answer."""
