"""How items, payloads and weights move: trees of arrays, channels, replay, transports, checksummed weights."""
